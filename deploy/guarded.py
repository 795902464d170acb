"""Replaces itself by a command that dies with the launcher.

Run as a plain script, `guarded.py LAUNCHER_PID COMMAND...`, in Python's isolated mode: it asks the kernel to kill this
process when the launcher ends for whatever reason (Linux), then becomes the command. Elsewhere that is left to the
guardian. It imports nothing of Rollwise, so that it costs some milliseconds and cannot fail with the project.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Never returns: ends in exec, or exits with 1 when the launcher is gone already."""
    launcher = int(arguments[0])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:  # it died before the kernel knew of the wish
        sys.exit(1)
    os.execv(arguments[1], arguments[1:])  # noqa: S606 -- the point of this script


if __name__ == "__main__":
    main(sys.argv[1:])
