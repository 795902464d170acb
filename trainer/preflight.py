"""What is checked of a job before it runs: data, prompt lengths, gold answers. Bad rows are named by number.

At submission the API checks up to `max_rows` rows of each data set; the worker checks all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollwise.v1 import common_pb2, verifier_pb2

from services.common.errors import InvalidArgument, RollwiseError, Unavailable
from trainer.config import JobSpec
from trainer.data import DataSet, load_data
from trainer.policies import resolve_policy
from trainer.prompts import Prompt, PromptBuilder
from trainer.rows import DataError

ERRORS_SHOWN = 100


class ChecksReferences(Protocol):
    """The part of the verifier that is needed here."""

    async def check_references(
        self, references: Sequence[common_pb2.Reference], *, timeout_seconds: float
    ) -> list[verifier_pb2.ReferenceCheck]:
        """One check a reference, in order."""
        ...


@dataclass(frozen=True)
class RowError:
    """One thing that is wrong; `row` counts from 1, in the data set that `field` begins with."""

    row: int | None
    field: str
    message: str

    def as_dict(self) -> dict[str, Any]:
        """For the problem document."""
        return {"row": self.row, "field": self.field, "message": self.message}


class PreflightError(RollwiseError):
    """The job is refused. With `service` set, the job may be fine and a service is out of reach."""

    def __init__(
        self,
        message: str,
        *,
        code: str,
        param: str | None = None,
        service: str | None = None,
        errors: Sequence[RowError] = (),
        todo: str | None = None,
    ) -> None:
        super().__init__(message, reason=code.upper())
        self.problem = code
        self.param = param
        self.service = service
        self.errors = list(errors[:ERRORS_SHOWN])
        self.todo = todo


@dataclass(frozen=True)
class JobData:
    """The data sets of a job; training data is without the prompts that are held out."""

    train: DataSet
    held_out: DataSet | None
    removed: int


@dataclass(frozen=True)
class PreflightReport:
    """What was checked."""

    rows: int
    held_out_rows: int
    removed: int
    references_checked: int


def load_job_data(spec: JobSpec) -> JobData:
    """Loads and checks the rows of a job. Raises PreflightError."""
    train = _load(spec, "data")
    if spec.evaluation is None:
        return JobData(train, None, 0)
    held_out = _load(spec, "evaluation.data")
    try:
        cleaned, removed = train.without_texts_of(held_out)
    except InvalidArgument as error:
        raise PreflightError(str(error), code="data_overlap", param="data") from error
    return JobData(cleaned, held_out, removed)


def build_prompts(
    spec: JobSpec, data: JobData, tokenizer: Any, context_length: int
) -> tuple[list[Prompt], list[Prompt]]:
    """Token ids of the training and the held-out prompts. Raises PreflightError naming rows that do not fit."""
    return (
        _build(spec, data.train, "data", tokenizer, context_length, spec.sampling.max_tokens),
        _build(spec, data.held_out, "evaluation.data", tokenizer, context_length, evaluation_tokens(spec))
        if data.held_out is not None
        else [],
    )


def evaluation_tokens(spec: JobSpec) -> int:
    """Longest answer of an evaluation."""
    given = spec.evaluation.max_tokens if spec.evaluation is not None else None
    return given or spec.sampling.max_tokens


async def check_references(
    prompts: Mapping[str, Sequence[Prompt]], verifier: ChecksReferences, *, seconds: float
) -> int:
    """Has every gold answer checked; returns how many. Raises PreflightError, with row numbers or the service."""
    errors: list[RowError] = []
    count = 0
    for source, rows in prompts.items():
        references = [prompt.reference for prompt in rows]
        try:
            checks = await verifier.check_references(references, timeout_seconds=seconds)
        except RollwiseError as error:
            raise PreflightError(
                f"the gold answers cannot be checked: the verifier failed ({error})",
                code="verifier_unavailable",
                service="verifier",
                todo="start it with `rollwise up`, or look with `rollwise doctor`; then submit again",
            ) from error
        count += len(checks)
        for prompt, check in zip(rows, checks, strict=True):
            if not check.usable:
                errors.append(RowError(prompt.row, f"{source}.answer", check.reason))
    if errors:
        first = errors[0]
        raise PreflightError(
            f"{len(errors)} gold answer{'s' if len(errors) > 1 else ''} cannot be judged against; the first is row "
            f"{first.row}: {first.message}",
            code="bad_reference",
            param=first.field.removesuffix(".answer"),
            errors=errors,
            todo="correct these rows, or leave them out",
        )
    return count


async def preflight(spec: JobSpec, verifier: ChecksReferences, *, max_rows: int, seconds: float) -> PreflightReport:
    """The check at submission. Raises PreflightError."""
    data, train, held_out = await asyncio.to_thread(_prepare, spec)
    checked = {"data": train[:max_rows], "evaluation.data": held_out[:max_rows]}
    count = await check_references(checked, verifier, seconds=seconds)
    return PreflightReport(len(train), len(held_out), data.removed, count)


def _prepare(spec: JobSpec) -> tuple[JobData, list[Prompt], list[Prompt]]:
    from transformers import AutoConfig, AutoTokenizer

    data = load_job_data(spec)
    folder = find_policy(spec)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        message = f"the policy in {folder} does not load: {error}"
        raise PreflightError(message, code="unknown_policy", param="policy") from error
    context_length = int(getattr(config, "max_position_embeddings", 0) or 2**31 - 1)
    return (data, *build_prompts(spec, data, tokenizer, context_length))


def find_policy(spec: JobSpec) -> Path:
    """Folder of the job's policy. Raises PreflightError for one that is not known or cannot be had."""
    try:
        return resolve_policy(spec.policy)
    except RollwiseError as error:
        raise PreflightError(str(error), code="unknown_policy", param="policy") from error


def _load(spec: JobSpec, param: str) -> DataSet:
    source = spec.data if param == "data" else spec.evaluation.data if spec.evaluation is not None else spec.data
    try:
        return load_data(source)
    except DataError as error:
        raise _bad_rows(error, param) from error
    except InvalidArgument as error:
        code = "empty_data" if error.reason == "EMPTY_DATA" else "bad_data"
        raise PreflightError(str(error), code=code, param=param) from error
    except Unavailable as error:
        raise PreflightError(str(error), code="hub_unreachable", param=param, service="hub") from error


def _build(
    spec: JobSpec, data: DataSet, param: str, tokenizer: Any, context_length: int, max_tokens: int
) -> list[Prompt]:
    try:
        builder = PromptBuilder(tokenizer, spec.format, context_length=context_length, max_tokens=max_tokens)
    except InvalidArgument as error:
        where = "evaluation.max_tokens" if param != "data" else "sampling.max_tokens"
        raise PreflightError(str(error), code="max_tokens_too_large", param=where) from error
    try:
        return builder.build_all(data)
    except DataError as error:
        raise _bad_rows(error, param) from error


def _bad_rows(error: DataError, param: str) -> PreflightError:
    rows = [RowError(p.row, f"{param}.{p.field}" if p.field else param, p.message) for p in error.problems]
    return PreflightError(str(error), code="bad_data", param=param, errors=rows, todo="correct these rows")
