"""The exceptions of Rollwise, and how each travels over gRPC.

Every class is also the standard-library error it stands in for, so code that knows nothing of Rollwise can catch it.
A server turns an error into a status with a google.rpc.ErrorInfo (reason, domain "rollwise", metadata); a client turns
that back into the same class with the same reason and metadata.
"""

from collections.abc import Iterable
from typing import ClassVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "rollwise"
DETAILS_KEY = "grpc-status-details-bin"
# HTTP/2 headers carry the message; past this, proxies and peers start to refuse them.
MAX_MESSAGE_CHARS = 2000


class RollwiseError(Exception):
    """Root of the tree. `reason` is a constant in UPPER_SNAKE_CASE for programs, the message is for people."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    default_reason: ClassVar[str] = "UNKNOWN"

    def __init__(self, message: str, *, reason: str | None = None, **metadata: str) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata = {key: str(value) for key, value in metadata.items()}

    def __str__(self) -> str:
        # KeyError and its kin print repr(args); people should read the sentence.
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword arguments are lost by the default pickling, which process pools use.
        return (_rebuild, (type(self), self.message, self.reason, self.metadata))


class InvalidArgument(RollwiseError, ValueError):
    """What was asked is malformed, whatever the state of the service."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_ARGUMENT"


class NotFound(RollwiseError, LookupError):
    """What was named does not exist."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = "NOT_FOUND"


class FailedPrecondition(RollwiseError, RuntimeError):
    """The service is in no state to do this, and asking again changes nothing until somebody changes that state."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "FAILED_PRECONDITION"


class ConfigurationError(FailedPrecondition):
    """A setting, or the set-up around the process, is wrong: the process cannot start (exit code 2)."""

    default_reason = "CONFIGURATION"


class ResourceExhausted(RollwiseError, RuntimeError):
    """Busy: a bound on work or size is reached. Try later, or send less."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "BUSY"


class Unavailable(RollwiseError, ConnectionError):
    """Something needed does not answer; the same call may succeed later."""

    code = grpc.StatusCode.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class DeadlineExceeded(RollwiseError, TimeoutError):
    """The deadline passed first; whether the call took effect is not known."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class Unauthenticated(RollwiseError, PermissionError):
    """The call carries no valid token."""

    code = grpc.StatusCode.UNAUTHENTICATED
    default_reason = "UNAUTHENTICATED"


class AlreadyExists(RollwiseError, ValueError):
    """What should be made is there already."""

    code = grpc.StatusCode.ALREADY_EXISTS
    default_reason = "ALREADY_EXISTS"


class Internal(RollwiseError, RuntimeError):
    """A fault of the service itself; `metadata["error_id"]` finds its traceback in the log."""

    code = grpc.StatusCode.INTERNAL
    default_reason = "INTERNAL"


_CLASSES: tuple[type[RollwiseError], ...] = (
    InvalidArgument,
    NotFound,
    FailedPrecondition,
    ResourceExhausted,
    Unavailable,
    DeadlineExceeded,
    Unauthenticated,
    AlreadyExists,
    Internal,
)
_BY_CODE: dict[grpc.StatusCode, type[RollwiseError]] = {
    **{cls.code: cls for cls in _CLASSES},
    # Codes that only gRPC itself or a foreign server answers with.
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgument,
    grpc.StatusCode.ABORTED: Unavailable,
    grpc.StatusCode.UNIMPLEMENTED: FailedPrecondition,
    grpc.StatusCode.PERMISSION_DENIED: Unauthenticated,
    grpc.StatusCode.DATA_LOSS: Internal,
    grpc.StatusCode.UNKNOWN: Internal,
}


def _rebuild(cls: type[RollwiseError], message: str, reason: str, metadata: dict[str, str]) -> RollwiseError:
    error = cls(message, reason=reason)
    error.metadata = metadata
    return error


def to_status(error: RollwiseError) -> status_pb2.Status:
    """Return the google.rpc.Status of an error: its code, its (shortened) message and one ErrorInfo."""
    message = error.message
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[: MAX_MESSAGE_CHARS - 1] + "…"
    detail = AnyMessage()
    metadata = {key: value[:MAX_MESSAGE_CHARS] for key, value in error.metadata.items()}
    detail.Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))
    return status_pb2.Status(code=error.code.value[0], message=message, details=[detail])


def from_status(
    code: grpc.StatusCode, details: str | None, trailing: Iterable[tuple[str, str | bytes]] | None, *, where: str = ""
) -> RollwiseError:
    """Return the error a call ended with, ready to be raised.

    Args:
        code: The call's status code; not OK.
        details: The call's status message.
        trailing: The call's trailing metadata, in which a Rollwise server puts reason and metadata.
        where: What was called, for the message of an error that a peer did not word itself, e.g. "127.0.0.1:7101".
    """
    cls = _BY_CODE.get(code, Internal)
    for key, value in trailing or ():
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        for detail in status_pb2.Status.FromString(value).details:
            info = error_details_pb2.ErrorInfo()
            if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
                return _rebuild(cls, details or cls.default_reason, info.reason, dict(info.metadata))
    message = details or code.name
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        # gRPC's own answer to an oversized message looks like "busy"; sending it again would never help.
        return InvalidArgument(f"{where}: {message}; send less in one call", reason="MESSAGE_TOO_LARGE")
    return cls(f"{where}: {message}" if where else message, reason=None if cls.code is code else code.name)
