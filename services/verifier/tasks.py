"""What a pool judges: one completion, or one reference, as bytes that name it completely."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

from services.verifier import worker
from services.verifier.extract import TAIL_CHARS, after_thinking

MAX_SENT_CHARS = 10 * TAIL_CHARS
"""A longer completion is cut to its end before it is sent to a worker; the domains look at less than this."""


@dataclass(frozen=True)
class Task:
    """One thing to judge. `fields` are the completion and the reference's fields of the domain."""

    op: str
    domain: str
    fields: tuple[tuple[str, str], ...]

    @cached_property
    def payload(self) -> bytes:
        """The task as JSON, as a worker reads it."""
        return json.dumps({"op": self.op, "domain": self.domain, **dict(self.fields)}).encode()

    @cached_property
    def key(self) -> bytes:
        """Hash of the content: tasks with one key have one verdict."""
        return hashlib.sha256(self.payload).digest()


def judge_math(gold: str, completion: str) -> Task:
    """A completion against a gold answer."""
    return Task(worker.JUDGE, worker.MATH, (("gold", gold), ("completion", shorten(completion))))


def check_math(gold: str) -> Task:
    """Whether a gold answer can be judged against."""
    return Task(worker.CHECK, worker.MATH, (("gold", gold),))


def judge_gym(task: str, entry_json: str, completion: str) -> Task:
    """A completion against a reasoning-gym entry."""
    fields = (("task", task), ("entry_json", entry_json), ("completion", shorten(completion)))
    return Task(worker.JUDGE, worker.REASONING_GYM, fields)


def check_gym(task: str, entry_json: str) -> Task:
    """Whether a reasoning-gym entry can be judged against."""
    return Task(worker.CHECK, worker.REASONING_GYM, (("task", task), ("entry_json", entry_json)))


def unsupported(domain: str) -> Task:
    """A task of a domain that is not built: answered NO_VERDICT without a worker."""
    return Task(worker.JUDGE, domain, ())


def shorten(completion: str) -> str:
    """The completion, or its end where it is longer than MAX_SENT_CHARS; the thinking rule sees all of it."""
    if len(completion) <= MAX_SENT_CHARS:
        return completion
    body = after_thinking(completion)
    return "<think>" if body is None else "</think>" + body[-MAX_SENT_CHARS:]
