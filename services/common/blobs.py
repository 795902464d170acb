"""Payloads too large for Redis, kept elsewhere; an entry carries pointer and hash, and the blob goes with its entry."""

import asyncio
import errno
import hashlib
import os
import re
import time
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from services.common.errors import InvalidArgument, NotFound, ResourceExhausted

# Larger payloads leave Redis. One entry of 1 MiB is cheap; a step of long rollouts is over a gigabyte.
BLOB_THRESHOLD_BYTES = 1024 * 1024
_POINTER = re.compile(r"[0-9a-f]{32}")


class BlobCorrupt(InvalidArgument):
    """The blob is there and is not what was written."""

    default_reason = "BLOB_CORRUPT"


class BlobStore(Protocol):
    """Where payloads go; shared by everyone who reads or writes the streams."""

    async def put(self, payload: bytes) -> str:
        """Store a payload durably and return its pointer, new for each call.

        Raises:
            ResourceExhausted: there is no room (reason DISK_FULL).
        """

    async def get(self, pointer: str, sha256: str) -> bytes:
        """Return a payload.

        Raises:
            NotFound: there is no such blob.
            BlobCorrupt: its SHA-256 (hexadecimal) is another one.
        """

    async def delete(self, pointer: str) -> None:
        """Forget a payload; one that is gone already is no error."""


class FolderBlobStore:
    """Blobs as files in a folder, which may be a volume that several machines share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    async def put(self, payload: bytes) -> str:
        """Store a payload durably and return its pointer."""
        pointer = uuid.uuid4().hex
        try:
            await asyncio.to_thread(self._write, pointer, payload)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ResourceExhausted(
                f"no room in {self.path} for {len(payload)} bytes: {error.strerror}; free some", reason="DISK_FULL"
            ) from error
        return pointer

    async def get(self, pointer: str, sha256: str) -> bytes:
        """Return a payload; NotFound when it is gone, BlobCorrupt when its hash is another one."""
        path = self._file(pointer)
        try:
            payload = await asyncio.to_thread(path.read_bytes)
        except FileNotFoundError:
            raise NotFound(f"blob {pointer} is not in {self.path}", reason="BLOB_MISSING") from None
        if hashlib.sha256(payload).hexdigest() != sha256:
            raise BlobCorrupt(f"blob {pointer} in {self.path} has another hash than its entry says")
        return payload

    async def delete(self, pointer: str) -> None:
        """Forget a payload; one that is gone already is no error."""
        await asyncio.to_thread(self._file(pointer).unlink, missing_ok=True)

    async def sweep(self, *, older_than_seconds: float, keep: Collection[str] = ()) -> int:
        """Delete blobs whose entry never came to be or is gone; return how many.

        Args:
            older_than_seconds: Younger blobs stay: their entry may be about to be published.
            keep: Pointers that entries still hold (`streams.referenced_blobs`), whatever their age.
        """
        return await asyncio.to_thread(self._sweep, time.time() - older_than_seconds, frozenset(keep))

    def _file(self, pointer: str) -> Path:
        # Pointers come back from Redis; one that is no pointer must not name a file elsewhere.
        if not _POINTER.fullmatch(pointer):
            raise NotFound(f"{pointer!r} is no blob pointer", reason="BLOB_MISSING")
        return self.path / pointer

    def _write(self, pointer: str, payload: bytes) -> None:
        temporary = self.path / f"{pointer}.tmp"
        try:
            with temporary.open("wb") as file:
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path / pointer)
        finally:
            temporary.unlink(missing_ok=True)

    def _sweep(self, before: float, keep: frozenset[str]) -> int:
        deleted = 0
        for path in self.path.iterdir():
            ours = _POINTER.fullmatch(path.name.removesuffix(".tmp"))
            if not ours or path.name in keep:
                continue
            try:
                if path.stat().st_mtime < before:
                    path.unlink()
                    deleted += 1
            except FileNotFoundError:
                continue  # settled meanwhile
        return deleted
