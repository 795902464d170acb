"""A task that talks to Redis ends when it is cancelled, at whatever moment that is."""

from __future__ import annotations

import asyncio

from services.common.redis_client import connect, execute


async def test_a_cancelled_task_ends_whatever_its_command_was_doing(redis_url: str) -> None:
    client = connect(redis_url)
    started = 0

    async def work() -> None:
        nonlocal started
        while True:
            started += 1
            if started % 2:
                assert await execute(client, "ECHO", str(started)) == str(started).encode()
            else:
                async with client.pipeline(transaction=True) as pipe:
                    pipe.echo(str(started))
                    assert await pipe.execute() == [str(started).encode()]

    for turns in range(120):
        task = asyncio.create_task(work())
        # From before its first step to well into its second command.
        for _ in range(turns % 40):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=2)
        assert done, f"still running after a cancellation {turns % 40} turns in"
        assert task.cancelled(), task.exception()
    # Connections that were left in mid-command have not kept a reply for the next one.
    assert await execute(client, "ECHO", "last") == b"last"
    await client.aclose()
