"""The sampler: exact distribution, noise that is a pure function, sound log-probs."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.generation.prefix_cache import Prefix, PrefixCache
from services.generation.running_batch import chunks
from services.generation.sampling import SamplingRows, sample, stream_key, uniforms
from services.generation.slot_cache import SlotCache


def rows(count, temperature=1.0, top_p=1.0, top_k=0):
    return SamplingRows(torch.full((count,), temperature), (top_p,) * count, (top_k,) * count)


def noise(key, count):
    return uniforms(np.full(count, key, dtype=np.uint64), np.arange(count, dtype=np.uint64))


def test_frequencies_match_the_distribution():
    torch.manual_seed(0)
    logits = torch.randn(600)
    draws = 60_000
    counts = torch.zeros(600)
    for start in range(0, draws, 6000):
        u = noise(stream_key(1, start), 6000)
        tokens, _ = sample(logits.repeat(6000, 1), rows(6000, 0.7), u)
        counts += torch.bincount(tokens, minlength=600)
    p = (logits.double() / 0.7).softmax(-1)
    chi = float((((counts - draws * p) ** 2) / (draws * p)).sum())
    # 599 degrees of freedom: mean 599, deviation 34.6; six deviations.
    assert 390 < chi < 810


@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.integers(1, 700),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 2**32 - 1),
)
def test_the_token_is_the_inverse_of_the_cumulative_distribution(vocabulary, temperature, seed, index):
    logits = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(seed % 2**31)) * 5
    u = noise(stream_key(seed, index), 3)
    assert ((u >= 0) & (u < 1)).all()
    tokens, logprobs = sample(logits.clone(), rows(3, temperature), u)
    exact = (logits.double() / np.float32(temperature).item()).log_softmax(-1)
    for row, token in enumerate(tokens.tolist()):
        cumulative = exact[row].exp().cumsum(-1)
        before = float(cumulative[token - 1]) if token else 0.0
        assert before - 1e-6 <= u[row] <= float(cumulative[token]) + 1e-6
        assert abs(float(logprobs[row]) - float(exact[row, token])) < 1e-4


def test_the_ends_of_the_unit_interval_never_pick_an_impossible_token():
    logits = torch.full((2, 513), -torch.inf)
    logits[:, 300] = 0.0
    logits[:, 301] = 1.0
    tokens, _ = sample(logits, rows(2), np.array([0.0, 1 - 2.0**-53]))
    assert tokens.tolist() == [300, 301]


def test_noise_differs_between_rollouts_seeds_and_positions():
    keys = [stream_key(seed, index) for seed in range(60) for index in range(60)]
    assert len(set(keys)) == 3600
    values = np.concatenate([noise(key, 20) for key in keys])
    assert len(np.unique(values)) == len(values)
    assert abs(values.mean() - 0.5) < 0.005
    starts = np.array([noise(key, 1)[0] for key in keys])
    assert abs(np.corrcoef(starts[:-1], starts[1:])[0, 1]) < 0.06


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(4000, 1)
    tokens, logprobs = sample(logits, rows(4000, top_p=0.75), noise(3, 4000))
    assert set(tokens.tolist()) == {0, 1}
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.625, 0.375])[tokens], atol=1e-5, rtol=0)


def test_the_prefix_cache_keeps_the_most_recent_within_its_bound():
    cache = PrefixCache(10)

    def prefix(length):
        return Prefix(torch.zeros(1, 2, length, 1, 1), torch.zeros(1), torch.zeros(1))

    for name in range(3):
        cache.put((False, (name,)), prefix(4))
        cache.get((False, (0,)))
    assert cache.get((False, (1,))) is None
    assert cache.get((False, (0,))) is not None
    assert cache.tokens == 8
    cache.put((False, (9,)), prefix(11))
    assert (len(cache), cache.tokens) == (2, 8)
    cache.clear()
    assert (len(cache), cache.tokens) == (0, 0)


@given(st.lists(st.integers(1, 50), max_size=40))
def test_prefill_parts_hold_everything_within_the_padded_bound(lengths):
    parts = chunks(lengths, lambda length: length, 64)
    assert sorted(length for part in parts for length in part) == sorted(lengths)
    assert all(len(part) == 1 or len(part) * max(part) <= 64 for part in parts)


def test_slots_keep_their_content_when_the_buffer_grows_or_is_reshaped():
    cache = SlotCache(max_rows=64, max_tokens=512)
    kept = torch.arange(2 * 2 * 5 * 1 * 2, dtype=torch.float32).reshape(2, 2, 5, 1, 2)
    cache.reserve(1, 5, kept)
    cache.fill([0], kept)
    cache.reserve(30, 5, kept)
    cache.fill([29], kept)
    cache.move(29, 1, 5)
    cache.reserve(2, 250, kept)
    slots, positions = cache.shape
    assert slots * positions <= 512
    cache.begin_step(torch.tensor([5, 5]), 6)
    new = torch.full((2, 1, 1, 2), -1.0)
    keys, values = cache.update(new, new, 1)
    assert keys.shape == (2, 1, 6, 2)
    for row in range(2):
        torch.testing.assert_close(keys[row, 0, :5], kept[1, 0, :, 0])
        torch.testing.assert_close(values[row, 0, :5], kept[1, 1, :, 0])
        assert keys[row, 0, 5].tolist() == [-1.0, -1.0]
