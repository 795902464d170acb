import gc
import tracemalloc

import numpy as np
import pytest
from rollwise.v1 import allocator_pb2, common_pb2, value_prior_pb2

from services.common.packing import pack_floats, pack_ids
from trainer.accounting import Admission, Final
from trainer.config import JobSpec
from trainer.recorder import Recorder, group_line
from trainer.run_state import RunState
from trainer.step import build_batch


def spec(preset="v0.5", **changes):
    return JobSpec.model_validate({"policy": "tiny", "data": {"path": "x"}, "preset": preset, **changes})


def group(prompt_id, rewards, *, step=3, prior=0.5, versions=((3, 2),), state=allocator_pb2.GROUP_STATE_COMPLETE):
    rollouts = [
        allocator_pb2.Rollout(
            index=i,
            token_ids=pack_ids([5, 6]),
            logprobs=pack_floats([-0.5, -0.25]),
            finish_reason=common_pb2.FINISH_REASON_STOP,
            version_spans=[common_pb2.VersionSpan(policy_version=v, token_count=n) for v, n in versions],
            reward=reward,
        )
        for i, reward in enumerate(rewards)
    ]
    return allocator_pb2.ScoredGroup(
        key=common_pb2.GroupKey(job_id="j", lineage=1, step=step, prompt_id=prompt_id),
        state=state,
        prompt_token_ids=pack_ids([1, 2, 3]),
        rollouts=rollouts,
        prior=value_prior_pb2.Prior(value=prior) if prior is not None else None,
        scale=allocator_pb2.RewardScale(low=0, high=1),
        policy_version=3,
    )


def build(*groups, preset="v0.5", version=3, **changes):
    keyed = {Admission(g.key.step, g.key.prompt_id, g.key.attempt): g for g in groups}
    return build_batch(keyed, spec(preset, **changes), policy_version=version)


def test_ids_and_logprobs_are_trained_as_they_were_sampled():
    batch = build(group("a", [1, 0, 0, 1]))
    assert len(batch.samples) == 4
    for sample in batch.samples:
        assert sample.completion_ids.tolist() == [5, 6] and sample.prompt_ids.tolist() == [1, 2, 3]
        assert sample.engine_logprobs.tolist() == [-0.5, -0.25]
        assert not sample.stale.any()


def test_groups_of_one_prompt_text_stay_apart_and_uneven_sizes_do_not_mix():
    batch = build(group("a", [1, 0, 1, 0, 0]), group("b", [1, 1, 1, 0]), preset="grpo")
    by_group = {}
    for sample in batch.samples:
        by_group.setdefault(sample.group, []).append(sample.advantage)
    assert len(by_group) == 2
    for values in by_group.values():
        assert sum(values) == pytest.approx(0, abs=1e-6)


def test_filtered_groups_end_with_their_cause_and_train_nothing():
    filtered = group("f", [], state=allocator_pb2.GROUP_STATE_FILTERED)
    filtered.cause, filtered.cause_detail = allocator_pb2.FILTER_CAUSE_NO_VERDICT, "verifier down"
    batch = build(group("a", [1, 0, 1, 0]), filtered)
    assert [(j.admission.prompt_id, j.final) for j in batch.judged] == [("a", Final.TRAINED), ("f", Final.FILTERED)]
    assert batch.causes == ["no_verdict: verifier down"]
    assert batch.metrics["groups_filtered"] == 1 and batch.metrics["groups_trained"] == 1


def test_a_group_older_than_the_bound_is_dropped_and_counted():
    old = group("old", [1, 0, 1, 0], versions=((1, 1), (3, 1)))
    batch = build(old, group("a", [1, 0, 1, 0]), max_staleness=1)
    assert [j.final for j in batch.judged] == [Final.DROPPED, Final.TRAINED]
    assert "2 versions old" in batch.causes[0]
    kept = build(old, max_staleness=2)
    assert [sample.stale.tolist() for sample in kept.samples] == [[True, False]] * 4
    assert kept.metrics["staleness_max"] == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda r: setattr(r, "logprobs", pack_floats([-1.0])),
        lambda r: setattr(r, "token_ids", b"\x01\x02\x03"),
        lambda r: r.version_spans.pop(),
        lambda r: setattr(r, "reward", float("nan")),
        lambda r: setattr(r, "reward", 7.0),
        lambda r: setattr(r, "logprobs", pack_floats([float("nan"), -1.0])),
    ],
)
def test_a_malformed_group_is_dropped_with_its_cause_and_the_others_are_trained(damage):
    bad = group("bad", [1, 0, 1, 0])
    damage(bad.rollouts[1])
    batch = build(bad, group("a", [1, 0, 1, 0]))
    assert [j.final for j in batch.judged] == [Final.DROPPED, Final.TRAINED]
    assert batch.causes[0].startswith("malformed: ")


def test_a_step_without_a_trainable_group_has_no_samples():
    batch = build(group("f", [], state=allocator_pb2.GROUP_STATE_FILTERED))
    assert batch.samples == [] and batch.metrics["reward_mean"] is None


def test_the_prior_is_scored_against_what_came():
    batch = build(group("a", [1, 1, 0, 0], prior=0.8))
    assert batch.metrics["prior_brier"] == pytest.approx(np.mean([0.04, 0.04, 0.64, 0.64]))
    assert batch.metrics["prior_squared_error"] == pytest.approx(0.09)
    assert batch.metrics["zero_signal_share"] == 0


def test_memory_is_flat_over_two_hundred_steps(tmp_path):
    job = spec(steps=400, prompts_per_step=4)
    order = [str(i) for i in range(50)]
    state, recorder = RunState(job, order, lineage=1), Recorder(tmp_path)

    def step():
        state.admit()
        chosen = state.credits.choose(
            step=state.steps_done, admitted_at=state.admitted_at, ready=set(state.ledger.in_flight)
        )
        groups = {a: group(a.prompt_id, [1, 0, 1, 0], step=a.step) for a in chosen}
        batch = build_batch(groups, job, policy_version=3)
        for judged in batch.judged:
            state.settle(judged.admission, judged.final, rollouts=judged.rollouts)
        recorder.groups(
            [
                group_line(j.group, step=state.steps_done, final=j.final, cause=None, baselines=j.baselines)
                for j in batch.judged
            ]
        )
        recorder.step({"step": state.steps_done, **batch.metrics})
        state.steps_done += 1

    for _ in range(20):
        step()
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(200):
        step()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 100_000, f"{grown} bytes more after 200 steps"
    assert len(state.ledger) == 0 and not state.admitted_at
