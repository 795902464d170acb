"""Ends every process group of the launcher when the launcher itself is gone.

The kernel's parent-death signal reaches only direct children; a service's own workers (the verifier's, say) would stay.
The guardian reads one command a line from its standard input, `+PGID` or `-PGID`. When the launcher ends, even by
SIGKILL, the pipe closes, and whatever groups are still listed are killed. It imports nothing of Rollwise.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

_GRACE_SECONDS = 2.0


def main() -> None:
    """Returns when the pipe is closed and every listed group was told to end."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        sign, number = line[:1], int(line[1:])
        if sign == "+":
            groups.add(number)
        else:
            groups.discard(number)
    for wanted in (signal.SIGTERM, signal.SIGKILL):
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, wanted)
        if groups and wanted == signal.SIGTERM:
            time.sleep(_GRACE_SECONDS)


if __name__ == "__main__":
    main()
