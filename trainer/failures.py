"""How a run of a job ends other than by finishing."""

from __future__ import annotations

from enum import StrEnum

from services.common.errors import RollwiseError
from trainer.records import JobError


class JobFailedError(RollwiseError):
    """The job cannot go on. `code` is stable and for programs; `service` or `param` say what is to blame."""

    def __init__(self, message: str, *, code: str, service: str | None = None, param: str | None = None) -> None:
        super().__init__(message, reason=code.upper())
        self.error = JobError(code=code, message=message, service=service, param=param)


class Interruption(StrEnum):
    """Why a worker leaves a job that could go on."""

    CANCEL = "cancel"
    # The worker was told to stop; the job goes back on the queue.
    STOP = "stop"
    # The job was resumed under a newer run, or its lineage moved on: it is somebody else's now.
    SUPERSEDED = "superseded"


class InterruptedRunError(Exception):
    """Unwinds a run; nothing is wrong with the job."""

    def __init__(self, why: Interruption) -> None:
        super().__init__(why.value)
        self.why = why


DISK_FULL = "disk_full"
