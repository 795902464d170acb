"""The in-context regression, and priors made from it."""

import time

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from services.common.errors import InvalidArgument
from services.value_prior import prediction, regression
from services.value_prior.embedder import SIZES, CachedEmbedder, HashingEmbedder, PolicyEmbedder, size_features
from services.value_prior.records import Feature, Outcome, PriorSource, Prompt


@pytest.fixture(scope="module")
def embedder():
    return CachedEmbedder(HashingEmbedder())


def rows_of(rng, count, columns=20, version=0):
    x = rng.standard_normal((count, columns))
    truth = 1 / (1 + np.exp(-1.5 * x[:, 0]))
    tried = np.full(count, 8.0)
    won = rng.binomial(8, truth).astype(float)
    return truth, regression.Rows(x.astype(np.float32), won, tried, np.full(count, float(version)))


def test_no_rows_give_the_uninformed_prior():
    mean, spread = regression.uninformed().predict(np.zeros((3, 5), dtype=np.float32))
    assert mean.tolist() == [0.5] * 3
    assert spread == pytest.approx([1 / np.sqrt(12)] * 3)


def test_few_rows_lie_between_a_half_and_their_mean():
    previous = 0.5
    for count in (1, 2, 4, 7):
        rows = regression.Rows(np.zeros((count, 3)), np.zeros(count), np.full(count, 4.0), np.zeros(count))
        mean, spread = regression.fit(rows, now=0).predict(np.zeros((1, 3)))
        assert 0 < mean[0] < previous
        assert 0.05 < spread[0] < 0.32
        previous = mean[0]


def test_regression_finds_the_direction_that_matters():
    rng = np.random.default_rng(3)
    _, rows = rows_of(rng, 400)
    truth, fresh = rows_of(rng, 300)
    mean, spread = regression.fit(rows, now=0).predict(fresh.embeddings)
    error = mean - truth
    assert np.mean(error**2) < 0.3 * np.var(truth)
    # The sd says how far off the predictions are, to within a factor of two.
    assert 0.5 < np.sqrt(np.mean(error**2)) / np.sqrt(np.mean(spread**2)) < 2


def test_noise_teaches_nothing_but_the_mean():
    rng = np.random.default_rng(4)
    x = rng.standard_normal((300, 40)).astype(np.float32)
    rows = regression.Rows(x, rng.binomial(8, 0.3, 300).astype(float), np.full(300, 8.0), np.zeros(300))
    mean, _ = regression.fit(rows, now=0).predict(rng.standard_normal((200, 40)))
    assert np.abs(mean - 0.3).max() < 0.12


def test_a_policy_that_learns_is_followed():
    rng = np.random.default_rng(5)
    versions = np.repeat(np.arange(16.0), 32)
    truth = 0.1 + 0.04 * versions
    rows = regression.Rows(np.zeros((512, 1)), rng.binomial(5, truth).astype(float), np.full(512, 5.0), versions)
    fitted = regression.fit(rows, now=15)
    assert fitted.discount == pytest.approx(0.875)
    assert fitted.predict(np.zeros((1, 1)))[0][0] == pytest.approx(0.7, abs=0.06)


def test_a_fit_of_512_rows_is_fast():
    _, rows = rows_of(np.random.default_rng(6), 512, columns=271)
    best = 1e9
    with threadpool_limits(1):
        for _ in range(5):
            start = time.thread_time()
            regression.fit(rows, now=0, direct=SIZES)
            best = min(best, time.thread_time() - start)
    # CPU time, which other processes cannot stretch much; about 12 ms on an idle core.
    assert best < 0.06, f"{best * 1e3:.0f} ms"


def arithmetic(rng, count):
    """Chain sums and the chance that a made-up policy solves them: falls with the number of digits."""
    made = []
    for number in range(count):
        digits = rng.integers(1, 5, size=rng.integers(2, 5))
        terms = [str(int(rng.integers(10 ** (d - 1), 10**d))) for d in digits]
        made.append((f"p{number}", f"Compute {' + '.join(terms)} =", 1 / (1 + np.exp(0.6 * (digits.sum() - 7)))))
    return made


def outcome(number, prompt_id, text, won, tried, version=0):
    return Outcome(f"o{number:05}", "policy", text, float(won), tried, policy_version=version, prompt_id=prompt_id)


def learnt(rng, embedder, count):
    rows = [outcome(i, pid, text, rng.binomial(5, p), 5) for i, (pid, text, p) in enumerate(arithmetic(rng, count))]
    return rows, prediction.fit(rows, embedder, fit_rows=1024)


def test_after_200_outcomes_the_prior_beats_the_constant_mean(embedder):
    rng = np.random.default_rng(7)
    rows, fitted = learnt(rng, embedder, 200)
    fresh = arithmetic(rng, 300)
    priors = fitted.predict([Prompt(text) for _, text, _ in fresh], embedder)
    truth = np.array([p for _, _, p in fresh])
    constant = sum(row.successes for row in rows) / sum(row.trials for row in rows)
    assert np.mean([(prior.value - p) ** 2 for prior, p in zip(priors, truth, strict=True)]) < 0.35 * np.mean(
        (constant - truth) ** 2
    )
    assert {prior.source for prior in priors} == {PriorSource.CONTEXT}


def test_a_prompts_own_history_moves_its_prior(embedder):
    rows, _ = learnt(np.random.default_rng(8), embedder, 100)
    text = "Compute 4 + 3 ="
    base = prediction.fit(rows, embedder, fit_rows=1024).predict([Prompt(text, "mine")], embedder)[0]
    failed = [outcome(900 + i, "mine", text, 0, 8) for i in range(3)]
    mine, anonymous = prediction.fit([*rows, *failed], embedder, fit_rows=1024).predict(
        [Prompt(text, "mine"), Prompt(text)], embedder
    )
    assert (base.source, mine.source, anonymous.source) == (
        PriorSource.CONTEXT,
        PriorSource.HISTORY,
        PriorSource.CONTEXT,
    )
    assert base.value > 0.7
    assert mine.value < 0.5 * base.value
    assert mine.value < anonymous.value


def test_a_prior_does_not_depend_on_the_other_prompts_of_the_call(embedder):
    rng = np.random.default_rng(9)
    _, fitted = learnt(rng, embedder, 80)
    prompts = [Prompt(text, pid) for pid, text, _ in arithmetic(rng, 20)]
    together = fitted.predict(prompts, embedder)
    alone = [fitted.predict([prompt], embedder)[0] for prompt in prompts]
    assert [p.value for p in together] == pytest.approx([p.value for p in alone], abs=1e-12)


def test_hashing_is_stable_between_processes_and_sees_digits_and_latex(embedder):
    first, second, third = embedder.embed(
        [Prompt("Find $\\frac{12}{7}$"), Prompt("Find $\\sqrt{12}$"), Prompt("Find $\\frac{13}{7}$")]
    )
    assert first.shape == (SIZES + 256,)
    assert not np.allclose(first[SIZES:], second[SIZES:])
    assert not np.allclose(first[SIZES:], third[SIZES:])
    again = HashingEmbedder().embed([Prompt("Find $\\frac{12}{7}$")])[0]
    assert np.array_equal(first, again)


def test_sizes_see_the_question_behind_a_shared_preamble():
    frame = "You are careful.\nExample: 987654 + 123456 = 1111110\nQuestion: {}\nAnswer:"
    small, large = (size_features(frame.format(question)) for question in ("1 + 2", "111 + 222"))
    assert len(small) == SIZES
    assert small[5] == large[5]  # the largest number is the preamble's
    assert small[-2:] < large[-2:]
    assert all(np.isfinite(size_features("9" * 5000 + " and ٣")))


def test_the_policy_embedder_uses_the_feature_and_names_a_row_without(embedder):
    values = np.arange(4, dtype="<f2")
    feature = Feature(2, "float16", 4, values.tobytes())
    vectors = CachedEmbedder(PolicyEmbedder()).embed([Prompt("a", feature=feature)])
    assert vectors.tolist() == [[0, 1, 2, 3]]
    with pytest.raises(InvalidArgument, match=r"prompts\[1\]\.feature is missing"):
        PolicyEmbedder().check([Prompt("a", feature=feature), Prompt("b")])


def test_the_cache_keeps_only_so_many_vectors():
    class Counting(HashingEmbedder):
        calls = 0

        def embed(self, prompts):
            Counting.calls += len(prompts)
            return super().embed(prompts)

    cached = CachedEmbedder(Counting(columns=4, buckets=64), size=2)
    cached.embed([Prompt("a"), Prompt("b"), Prompt("a")])
    cached.embed([Prompt("a"), Prompt("b")])
    assert Counting.calls == 2
    cached.embed([Prompt("c"), Prompt("a")])
    assert Counting.calls == 3
    cached.embed([Prompt("b")])
    assert Counting.calls == 4
