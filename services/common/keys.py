"""Names of all Redis keys, so that no two parts of the system can mean different things by one name.

Keys of a job start with `rollwise:job:<id>:`, which is what its owner deletes when the job is deleted; keys outside a
job either are one of the shared streams or carry a time to live.
"""

from services.common.errors import InvalidArgument

NAMESPACE = "rollwise"


def prompts() -> str:
    """Stream of PromptEntry from trainers to allocators (group "allocator")."""
    return f"{NAMESPACE}:prompts"


def outcomes() -> str:
    """Stream of Outcome from allocators to value priors (group "value-prior")."""
    return f"{NAMESPACE}:outcomes"


def jobs() -> str:
    """Stream of submitted jobs from the API to trainer workers."""
    return f"{NAMESPACE}:jobs"


def job_index() -> str:
    """Sorted set of all job ids by the time of their submission."""
    return f"{NAMESPACE}:job-index"


def idempotency(token: str) -> str:
    """What an Idempotency-Key of the HTTP API led to; has a time to live."""
    return f"{NAMESPACE}:idempotency:{token}"


def seen(stream: str, entry_id: str) -> str:
    """Marks an entry as published, with the ids it got; has a time to live.

    The stream is part of the name because a prompt and the group it becomes may share one entry id.
    """
    return f"{NAMESPACE}:seen:{stream}:{entry_id}"


def dead(stream: str) -> str:
    """Stream of entries that could not be read, or were delivered too often."""
    return f"{stream}:dead"


def job_prefix(job_id: str) -> str:
    """What every key of a job starts with.

    Raises:
        InvalidArgument: the id is empty or holds a character that could reach into another job's keys.
    """
    if not job_id or any(character in job_id for character in ":*?[]{} \t\r\n"):
        raise InvalidArgument(f"{job_id!r} is no usable job id: it is empty or has one of : * ? [ ] {{ }} or a blank")
    return f"{NAMESPACE}:job:{job_id}:"


def job(job_id: str) -> str:
    """Hash with the job's state."""
    return job_prefix(job_id) + "state"


def groups(job_id: str) -> str:
    """Stream of training ScoredGroups (group "trainer")."""
    return job_prefix(job_id) + "groups"


def evals(job_id: str) -> str:
    """Stream of evaluation ScoredGroups (group "trainer")."""
    return job_prefix(job_id) + "evals"


def events(job_id: str) -> str:
    """Stream of the job's events, as GET /v1/jobs/<id>/events shows them."""
    return job_prefix(job_id) + "events"


def lineage(job_id: str) -> str:
    """Integer: the job's current lineage, its fencing number."""
    return job_prefix(job_id) + "lineage"


def heartbeat(job_id: str) -> str:
    """Says which worker runs the job; has a time to live."""
    return job_prefix(job_id) + "heartbeat"


def cancel(job_id: str) -> str:
    """Set when somebody asked for the job to stop."""
    return job_prefix(job_id) + "cancel"


def lock(job_id: str) -> str:
    """Held by the one worker that trains the job; has a time to live."""
    return job_prefix(job_id) + "lock"


def probe(job_id: str) -> str:
    """State of the job's probe."""
    return job_prefix(job_id) + "probe"
