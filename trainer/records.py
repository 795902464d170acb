"""What is known of a job, as people and programs see it. This module knows no store."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class JobState(StrEnum):
    """Life of a job. The last three are terminal until somebody resumes the job."""

    QUEUED = "queued"
    VALIDATING = "validating"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """True when nothing more happens unless the job is resumed."""
        return self in TERMINAL


TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})


class Record(BaseModel):
    """Base of what is stored and answered."""

    model_config = ConfigDict(extra="ignore")


class JobError(Record):
    """Why a job failed. `code` is stable and for programs; `message` says what to do."""

    code: str
    message: str
    param: str | None = Field(None, description="the field of the specification that is to blame")
    service: str | None = Field(None, description="the service that is to blame")


class Progress(Record):
    """How far a job is. The counts are of training prompts: submitted = trained + filtered + dropped + in_flight."""

    step: int = Field(0, description="steps done")
    steps: int = 0
    submitted: int = 0
    trained: int = 0
    filtered: int = 0
    dropped: int = 0
    in_flight: int = 0
    rollouts: int = Field(0, description="of groups that have ended")
    policy_version: int = 0
    lineage: int = 0


class JobRecord(Record):
    """A job. Times are Unix seconds."""

    id: str
    object: str = "training.job"
    name: str | None = None
    state: JobState = JobState.QUEUED
    run: int = Field(1, description="grows with every resume; what an older run still writes is refused")
    spec: dict[str, Any] = Field(default_factory=dict)
    created_at: float = 0.0
    started_at: float | None = None
    finished_at: float | None = None
    progress: Progress = Progress()
    error: JobError | None = None
    cancel_requested: bool = False
    worker: str | None = None
