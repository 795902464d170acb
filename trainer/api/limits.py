"""A limit on the size of a request's body, whether or not its length was announced."""

from __future__ import annotations

import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainer.api.problems import problem

MAX_BODY_BYTES = 4 << 20


class BodyLimit:
    """ASGI middleware: answers 413 before more than `limit` bytes are kept."""

    def __init__(self, app: ASGIApp, limit: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limit:
            await self._refuse(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._limit:
                raise _TooLargeError
            return message

        async def watched(message: Message) -> None:
            # FastAPI turns any error while reading into an answer of its own, which is not sent.
            if read <= self._limit:
                await send(message)

        with contextlib.suppress(_TooLargeError):
            await self._app(scope, counted, watched)
        if read > self._limit:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        todo = "give data by path, not in the request"
        detail = f"the body is larger than {self._limit} bytes"
        await problem(413, "too_large", detail, todo=todo)(scope, receive, send)


class _TooLargeError(Exception):
    """More came than was allowed."""
