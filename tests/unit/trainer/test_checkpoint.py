"""Checkpoints are complete or absent (faults K1, K2, K4), and training goes on from one as if never stopped."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.errors import FailedPrecondition, NotFound, ResourceExhausted
from trainer.batch import Sample
from trainer.checkpoint import MARKER, Checkpoints, defect, set_random_state
from trainer.config import LossSpec, OptimizerSpec
from trainer.optimizer import Optimizer
from trainer.policy import Policy
from trainer.update import train_step


def write_model(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"w" * 1000)


def save(store: Checkpoints, step: int, **changes: object) -> Path:
    arguments = {"write_model": write_model, "optimizer": {"a": torch.ones(3)}, "state": {"position": step}, **changes}
    return store.save(step, **arguments)  # type: ignore[arg-type]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    save(store, 10, state={"ids": ["a", "b"], "version": 3}, value_prior=b"\x00prior")
    restored = store.load()
    assert (restored.step, restored.state, restored.value_prior) == (
        10,
        {"ids": ["a", "b"], "version": 3},
        b"\x00prior",
    )
    assert (restored.model / "model.safetensors").stat().st_size == 1000
    torch.testing.assert_close(restored.optimizer["a"], torch.ones(3))


def test_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    torch.manual_seed(3)
    random.gauss(0, 1)
    np.random.normal()
    save(store, 1)
    expected = (random.random(), random.gauss(0, 1), float(np.random.normal()), torch.rand(2).tolist())
    set_random_state(store.load().random_state)
    assert (random.random(), random.gauss(0, 1), float(np.random.normal()), torch.rand(2).tolist()) == expected


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 10, 11):
        save(store, step)
    assert [p.name for p in store.list()] == ["step-000010", "step-000011"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000010", "step-000011"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    save(store, 5)
    save(store, 5, state={"position": 77})
    assert store.load().state == {"position": 77}


@pytest.mark.parametrize("damage", ["marker", "short", "missing", "garbled"])
def test_a_half_written_checkpoint_is_passed_over_and_refused_by_name(tmp_path: Path, damage: str) -> None:
    store = Checkpoints(tmp_path)
    save(store, 1)
    broken = save(store, 2)
    match damage:
        case "marker":
            (broken / MARKER).unlink()
        case "short":
            os.truncate(broken / "model" / "model.safetensors", 10)
        case "missing":
            (broken / "optimizer.pt").unlink()
        case "garbled":
            (broken / MARKER).write_text("{")
    latest = store.latest()
    assert latest is not None
    assert latest.name == "step-000001"
    assert store.load().step == 1
    with pytest.raises(FailedPrecondition, match="step-000002 is not complete"):
        store.load(broken)


def test_no_checkpoint_is_an_error_that_says_where(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=str(tmp_path)):
        Checkpoints(tmp_path / "none").load()
    assert Checkpoints(tmp_path / "none").latest() is None


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_full_disk_names_path_and_space_and_leaves_the_old_checkpoint(tmp_path: Path, wrapped: bool) -> None:
    store = Checkpoints(tmp_path)
    save(store, 1)

    def full(folder: Path) -> None:
        (folder / "part").write_bytes(b"x" * 100)
        if wrapped:
            raise RuntimeError("I/O error: No space left on device (os error 28)")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ResourceExhausted, match=r"step 2 in .* MiB free.*older checkpoints are untouched") as caught:
        save(store, 2, write_model=full)
    assert caught.value.metadata["path"] == str(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    assert store.load().step == 1


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="needs /dev/full")
def test_a_real_write_to_a_full_device_is_told_as_such(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        with open("/dev/full", "wb", buffering=0) as device:  # noqa: PTH123
            device.write(b"x" * 10)

    with pytest.raises(ResourceExhausted):
        save(Checkpoints(tmp_path), 1, write_model=full)
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_is_no_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        save(Checkpoints(tmp_path / "c"), 1, state={"x": object()})
    assert not (tmp_path / "c").exists()


def test_a_kill_in_the_middle_of_writing_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path), 1)
    script = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from trainer.checkpoint import Checkpoints
        def write(folder):
            (folder / "model.safetensors").write_bytes(b"half")
            print("writing", flush=True)
            time.sleep(60)
        Checkpoints(Path(sys.argv[1])).save(2, write_model=write, optimizer={}, state={})
        """
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    store = Checkpoints(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert store.load().step == 1
    save(store, 2)
    # The next save also clears away what the killed process left.
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_pruning_takes_the_marker_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Checkpoints(tmp_path, keep=1)
    first = save(store, 1)
    seen = []
    monkeypatch.setattr("trainer.checkpoint.shutil.rmtree", lambda path, **_: seen.append(defect(Path(path))))
    save(store, 2)
    assert seen == [f"it has no {MARKER}"]
    assert first.exists()


def test_training_from_a_checkpoint_equals_uninterrupted_training(
    model_folder: Path, samples: list[Sample], tmp_path: Path
) -> None:
    spec = OptimizerSpec(learning_rate=1e-2, warmup_steps=4)

    def steps(policy: Policy, optimizer: Optimizer, count: int) -> None:
        for _ in range(count):
            train_step(policy, optimizer, samples, LossSpec(), temperature=1.0, micro_batch_tokens=64)

    whole = Policy(model_folder)
    steps(whole, Optimizer(whole.model.parameters(), spec), 6)

    first = Policy(model_folder)
    optimizer = Optimizer(first.model.parameters(), spec)
    steps(first, optimizer, 3)
    store = Checkpoints(tmp_path)
    store.save(3, write_model=first.write, optimizer=optimizer.state_dict(), state={})
    restored = store.load()
    second = Policy(restored.model)
    resumed = Optimizer(second.model.parameters(), spec)
    resumed.load_state_dict(restored.optimizer)
    assert resumed.learning_rate == pytest.approx(1e-2)
    steps(second, resumed, 3)
    for a, b in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


def test_a_checkpoint_of_many_files_is_quick_to_list(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=20)
    for step in range(20):
        save(store, step)
    began = time.monotonic()
    assert len(store.list()) == 20
    assert time.monotonic() - began < 2
