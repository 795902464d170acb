import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from services.common import lifecycle
from services.common.errors import ConfigurationError, Unavailable
from services.common.lifecycle import Background
from services.common.logging import bind_context, configure_logging, context, get_logger
from services.common.paths import write_atomically


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, before = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**before)


async def fail_soon() -> None:
    await asyncio.sleep(0.01)
    raise ValueError("boom")


async def test_a_background_failure_ends_the_main_task_with_that_failure() -> None:
    cancelled = asyncio.Event()

    async def other() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    with pytest.raises(ValueError, match="boom"):
        async with Background() as background:
            background.start("other", other())
            background.start("fail", fail_soon())
            await asyncio.sleep(60)
    assert cancelled.is_set()
    await asyncio.sleep(0)  # the cancellation was taken back: this task goes on


async def test_background_tasks_end_with_their_block() -> None:
    async with Background() as background:
        task = background.start("sleep", asyncio.sleep(60))
        with pytest.raises(ValueError, match="runs already"):
            background.start("sleep", asyncio.sleep(60))
    assert task.cancelled()


async def test_cancelling_one_background_task_is_no_failure() -> None:
    async with Background() as background:
        background.start("sleep", asyncio.sleep(60))
        await background.cancel("sleep")
        background.start("sleep", asyncio.sleep(60))


async def test_a_cancellation_from_outside_stays_one() -> None:
    async def main() -> None:
        async with Background() as background:
            background.start("sleep", asyncio.sleep(60))
            await asyncio.sleep(60)

    task = asyncio.create_task(main())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def raising(error: BaseException) -> Callable[[], Coroutine[Any, Any, None]]:
    async def main() -> None:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError("the port is in use"), 2),
        (Unavailable("redis is gone"), 1),
        (KeyError("x"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_the_exit_code_mirrors_the_outcome(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        lifecycle.run(raising(error), service="probe")
    assert stop.value.code == code
    if code == 2:
        assert "probe: cannot start: the port is in use" in capsys.readouterr().err


def test_log_lines_are_json_with_the_bound_context(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("probe", "info", "json")
    structlog.contextvars.clear_contextvars()
    bind_context(job_id="j1", step=3)
    try:
        get_logger("x").info("group closed", cause="deadline")
        get_logger("x").debug("not shown")
        bind_context(step=None)
        assert context() == {"job_id": "j1"}
    finally:
        structlog.contextvars.clear_contextvars()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    line = json.loads(lines[0])
    assert {"service": "probe", "job_id": "j1", "step": 3, "event": "group closed", "cause": "deadline"}.items() <= (
        line.items()
    )


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "current.json"
    write_atomically(path, b"old")

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
