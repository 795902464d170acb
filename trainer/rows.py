"""The rows of a data set: their schema, and the reference each is judged against.

A row of a JSONL file is `{id?, prompt | messages, domain?, answer | tests | tool_calls | constraints | gym}`; other
keys are refused, since a misspelt `answer` would otherwise train on nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from rollwise.v1 import common_pb2

from services.common.errors import InvalidArgument

SHOWN = 20
"""Problems listed in a DataError's message; all of them are in its `problems`."""

DomainName = Literal["math", "code", "tool_call", "instruction_following", "reasoning_gym"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Message(_Strict):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class CodeTest(_Strict):
    """Either a pair of `stdin` and `expected_stdout`, or an `assertion`."""

    stdin: str | None = None
    expected_stdout: str | None = None
    assertion: str | None = None

    @model_validator(mode="after")
    def _one_form(self) -> CodeTest:
        if (self.assertion is None) == (self.expected_stdout is None):
            raise ValueError("give either expected_stdout (with stdin) or assertion")
        if self.assertion is not None and self.stdin is not None:
            raise ValueError("stdin belongs to expected_stdout, not to assertion")
        return self


class ToolCall(_Strict):
    """One expected call."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class ToolCalls(_Strict):
    """Accepted answers, each a list of calls; `ordered` says whether their order counts."""

    accepted: list[list[ToolCall]] = Field(min_length=1)
    ordered: bool = False


class Constraint(_Strict):
    """One instruction to follow, by the name of its family in IFEval."""

    id: str
    kwargs: dict[str, Any] = Field(default_factory=dict)


class GymEntry(_Strict):
    """An entry of reasoning-gym that its own scorer judges."""

    task: str
    entry: dict[str, Any]


_KEY_OF_DOMAIN: dict[str, str] = {
    "math": "answer",
    "code": "tests",
    "tool_call": "tool_calls",
    "instruction_following": "constraints",
    "reasoning_gym": "gym",
}


class DataRow(_Strict):
    """One row as written. `domain` may be left out: the key that holds the reference says it."""

    id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    domain: DomainName | None = None
    answer: Annotated[str, Field(min_length=1)] | None = None
    language: str = "python"
    tests: Annotated[list[CodeTest], Field(min_length=1)] | None = None
    tool_calls: ToolCalls | None = None
    constraints: Annotated[list[Constraint], Field(min_length=1)] | None = None
    gym: GymEntry | None = None

    @model_validator(mode="before")
    @classmethod
    def _plain_forms(cls, given: Any) -> Any:
        """A number is accepted as `id` or `answer`, and a bare list of calls as `tool_calls`."""
        if not isinstance(given, dict):
            return given
        given = dict(given)
        for key in ("id", "answer"):
            if isinstance(given.get(key), int | float) and not isinstance(given[key], bool):
                given[key] = str(given[key])
        calls = given.get("tool_calls")
        if isinstance(calls, list):
            alternatives = calls if calls and isinstance(calls[0], list) else [calls]
            given["tool_calls"] = {"accepted": alternatives}
        return given

    @model_validator(mode="after")
    def _consistent(self) -> DataRow:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of prompt and messages")
        if self.prompt is not None and not self.prompt.strip():
            raise ValueError("prompt is blank")
        if self.messages is not None and self.messages[-1].role == "assistant":
            raise ValueError("the last message is the assistant's: there is nothing left to answer")
        given = [key for key in _KEY_OF_DOMAIN.values() if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of {', '.join(_KEY_OF_DOMAIN.values())} (got {', '.join(given) or 'none'})"
            )
        if self.domain is not None and _KEY_OF_DOMAIN[self.domain] != given[0]:
            raise ValueError(f"domain {self.domain} needs {_KEY_OF_DOMAIN[self.domain]}, not {given[0]}")
        return self

    def reference(self) -> common_pb2.Reference:
        """The message the verifier judges against."""
        if self.answer is not None:
            return common_pb2.Reference(
                domain=common_pb2.DOMAIN_MATH, math=common_pb2.MathReference(answer=self.answer)
            )
        if self.tests is not None:
            tests = [common_pb2.CodeTest(**test.model_dump(exclude_none=True)) for test in self.tests]
            return common_pb2.Reference(
                domain=common_pb2.DOMAIN_CODE, code=common_pb2.CodeReference(language=self.language, tests=tests)
            )
        if self.tool_calls is not None:
            accepted = [json.dumps([c.model_dump() for c in calls]) for calls in self.tool_calls.accepted]
            return common_pb2.Reference(
                domain=common_pb2.DOMAIN_TOOL_CALL,
                tool_call=common_pb2.ToolCallReference(accepted_json=accepted, ordered=self.tool_calls.ordered),
            )
        if self.constraints is not None:
            return common_pb2.Reference(
                domain=common_pb2.DOMAIN_INSTRUCTION_FOLLOWING,
                instruction=common_pb2.InstructionReference(
                    constraints_json=json.dumps([c.model_dump() for c in self.constraints])
                ),
            )
        assert self.gym is not None
        return common_pb2.Reference(
            domain=common_pb2.DOMAIN_REASONING_GYM,
            reasoning_gym=common_pb2.ReasoningGymReference(
                task=self.gym.task, entry_json=json.dumps(self.gym.entry, sort_keys=True)
            ),
        )


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the data; `row` counts from 1, `field` may be empty."""

    row: int
    field: str
    message: str

    def __str__(self) -> str:
        return f"row {self.row}{f', {self.field}' if self.field else ''}: {self.message}"


class DataError(InvalidArgument):
    """Bad rows, all of them at once; the message lists the first SHOWN."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [f"  {problem}" for problem in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"  ... and {len(self.problems) - SHOWN} more")
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        super().__init__(f"{source}: {count} in the data\n" + "\n".join(lines), reason="BAD_DATA")


def problems_of(number: int, error: ValidationError) -> Iterable[Problem]:
    """A pydantic error in words that name the row and the field."""
    for detail in error.errors(include_url=False):
        field = ".".join(str(part) for part in detail["loc"])
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            message = f"unknown key; known keys are {', '.join(DataRow.model_fields)}"
        yield Problem(number, field, message)
