"""The `rollwise` command: a client of the services like any other, over HTTP and gRPC."""

import sys
from types import TracebackType


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ctrl-C while the program is still being loaded is no fault: no traceback."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


if sys.excepthook is sys.__excepthook__:
    sys.excepthook = _hook
