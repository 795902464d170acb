"""The part of a run that computes: the policy, its optimizer, their files. Called from a thread, one call at a time.

Knows no service, no stream and no job store.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.common.errors import ResourceExhausted
from trainer.batch import Sample
from trainer.checkpoint import Checkpoints, Restored, set_random_state
from trainer.config import JobSpec
from trainer.failures import DISK_FULL, JobFailedError
from trainer.optimizer import Optimizer
from trainer.policy import Policy
from trainer.update import train_step
from trainer.weights import WeightFolders


class Learner:
    """One job's policy in training."""

    def __init__(self, spec: JobSpec, folder: Path, *, threads: int = 0) -> None:
        self._spec = spec
        self._threads = threads
        self.checkpoints = Checkpoints(folder / "checkpoints", keep=spec.keep_checkpoints)
        self.weights = WeightFolders(folder / "weights")
        self.policy: Policy
        self.optimizer: Optimizer

    def open(self, find_base: Callable[[], Path]) -> Restored | None:
        """Loads the newest checkpoint, and returns it; or the policy from `find_base`, and returns None."""
        if self._threads:
            torch.set_num_threads(self._threads)
        torch.use_deterministic_algorithms(self._spec.deterministic)
        latest = self.checkpoints.latest()
        restored = self.checkpoints.load(latest) if latest is not None else None
        self.policy = Policy(restored.model if restored is not None else find_base())
        self.optimizer = Optimizer(self.policy.model.parameters(), self._spec.optimizer)
        if restored is None:
            random.seed(self._spec.seed)
            np.random.seed(self._spec.seed % 2**32)
            torch.manual_seed(self._spec.seed)
        else:
            self.optimizer.load_state_dict(restored.optimizer)
            set_random_state(restored.random_state)
        return restored

    def train(self, samples: Sequence[Sample], on_micro_batch: Callable[[], None]) -> dict[str, float]:
        """One optimizer step; returns its metrics. An exception of `on_micro_batch` ends it before the step."""
        try:
            report = train_step(
                self.policy,
                self.optimizer,
                samples,
                self._spec.algorithm.loss,
                temperature=self._spec.sampling.temperature,
                micro_batch_tokens=self._spec.optimizer.micro_batch_tokens,
                on_micro_batch=on_micro_batch,
            )
        except BaseException:
            self.optimizer.zero_grad()
            raise
        return report.metrics

    def write_weights(self, version: int) -> Path:
        """Writes the folder of a version. Raises JobFailedError (disk_full)."""
        try:
            return self.weights.write(version, self.policy)
        except Exception as error:
            if not is_disk_full(error):
                raise
            raise _disk_full(f"no space left for the weights of version {version} in {self.weights.root}") from error

    def save(self, step: int, state: dict[str, Any], value_prior: bytes | None) -> Path:
        """Writes a checkpoint. Raises JobFailedError (disk_full); older checkpoints are untouched then."""
        try:
            return self.checkpoints.save(
                step,
                write_model=self.policy.write,
                optimizer=self.optimizer.state_dict(),
                state=state,
                value_prior=value_prior,
            )
        except ResourceExhausted as error:
            raise _disk_full(str(error)) from error

    def close(self) -> None:
        """Lets the memory go."""
        for name in ("policy", "optimizer"):
            if hasattr(self, name):
                delattr(self, name)
        torch.use_deterministic_algorithms(False)


def is_disk_full(error: BaseException | None) -> bool:
    """True for a full disk or quota, also where a library wrapped the system's error in one of its own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _disk_full(message: str) -> JobFailedError:
    hint = "" if "resume" in message else "; free some space, then resume the job: it goes on from its last checkpoint"
    return JobFailedError(message + hint, code=DISK_FULL)


def process_id() -> str:
    """Names this process for heartbeats: no two live processes share it."""
    return f"{os.uname().nodename}:{os.getpid()}"
