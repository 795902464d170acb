import json

import numpy as np
import pytest
from rollwise.v1 import common_pb2

from trainer.accounting import Admission, Final
from trainer.config import JobSpec
from trainer.entries import training_entry
from trainer.evaluate import summarise
from trainer.prompts import Prompt
from trainer.recorder import Recorder, clean, read_lines
from trainer.run_state import RunState, admissions_of
from trainer.weights import WeightFolders


def spec(**changes):
    return JobSpec.model_validate({"policy": "tiny", "data": {"path": "x"}, **changes})


def prompt(prompt_id="p"):
    return Prompt(prompt_id, 1, np.array([1, 2], np.uint32), "1+1", common_pb2.Reference())


# ------------------------------------------------------------------------------------------ seeds


def test_two_jobs_with_one_seed_draw_the_same_rollouts():
    def seed(job_id="a", step=1, given=7, **more):
        entry = training_entry(
            spec(seed=given), prompt(), Admission(step, "p"), job_id=job_id, lineage=2, policy_version=0, **more
        )
        return entry.sampling.seed

    assert seed("a") == seed("b")
    assert len({seed(), seed(step=2), seed(given=8), seed(resampled=True)}) == 4


# ------------------------------------------------------------------------------------ data position


def test_an_interrupted_run_admits_what_an_uninterrupted_one_does():
    job = spec(steps=7, prompts_per_step=3, max_staleness=1, seed=3)
    order = [f"p{i}" for i in range(10)]
    straight = [a for step in range(7) for a in admissions_of(step, job, order)]

    def take(state, trained):
        state.admit()
        for admission in state.ledger.in_flight[:3]:
            state.settle(admission, Final.TRAINED, rollouts=4)
            trained.append(admission)
        state.steps_done += 1

    state, trained = RunState(job, order, lineage=1), []
    for _ in range(3):
        take(state, trained)
    saved = json.loads(json.dumps(state.state()))
    take(state, [])  # lost with the crash
    resumed = RunState(job, order, lineage=2)
    resumed.take_up(saved)
    assert len(resumed.resampled) == 3 and set(resumed.admitted_at.values()) == {3}
    while resumed.steps_done < 7:
        take(resumed, trained)
    assert sorted(trained) == sorted(straight)
    assert resumed.ledger.submitted == resumed.ledger.trained == 21


def test_a_data_set_smaller_than_a_step_gives_a_prompt_more_than_once_under_different_names():
    admissions = admissions_of(0, spec(prompts_per_step=5), ["a", "b"])
    assert len(set(admissions)) == 5
    assert {a.prompt_id for a in admissions} == {"a", "b"}


# ------------------------------------------------------------------------------------------ files


def test_a_resume_leaves_every_step_and_group_in_the_records_once(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.evaluation({"step": 0, "accuracy": 0.1})
    for step in range(4):
        recorder.step({"step": step, "loss": float("nan")})
        recorder.groups([{"step": step, "prompt": "é"}])
        if step == 1:
            recorder.evaluation({"step": 2, "accuracy": 0.2})
    with recorder.metrics_path.open("a") as file:
        file.write('{"kind": "step", "st')  # torn by a kill
    recorder.rewind(2)
    kept = list(read_lines(recorder.metrics_path))
    assert [(line["kind"], line["step"]) for line in kept] == [
        ("evaluation", 0),
        ("step", 0),
        ("step", 1),
        ("evaluation", 2),
    ]
    assert kept[1]["loss"] is None
    assert [line["step"] for line in read_lines(recorder.trail_path)] == [0, 1]


def test_numbers_that_json_lacks_become_null():
    assert clean({"a": float("inf"), "b": [float("nan"), 1.5], "c": "x"}) == {"a": None, "b": [None, 1.5], "c": "x"}


class Fake:
    """Anything with `save`."""

    def save(self, folder):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"w")


def test_a_version_is_deleted_only_after_another_was_acknowledged(tmp_path):
    folders = WeightFolders(tmp_path / "weights")
    assert folders.versions() == []
    for version in range(3):
        folders.write(version, Fake())
    assert folders.versions() == [0, 1, 2]
    folders.acknowledged(1)
    assert folders.versions() == [1]
    folders.acknowledged(1)
    assert folders.versions() == [1]


# ------------------------------------------------------------------------------------- evaluation


def test_accuracy_is_a_mean_over_judged_prompts():
    result = summarise([[1.0], [0.0, 1.0], [1.0]], prompts=5, unjudged=2, causes={"no_verdict": 2})
    assert result["accuracy"] == pytest.approx(2.5 / 3)
    assert (result["judged_prompts"], result["unjudged_prompts"], result["rollouts"]) == (3, 2, 6)
    assert summarise([], prompts=2, unjudged=0, causes={})["accuracy"] is None
