"""How processes notice each other's death: a child that dies with its parent, and a handle that tells of a process's end."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, however the parent ends.

    Call it first thing in a child. ``parent_pid`` is the expected parent: if it has already gone, the process exits at once.
    Linux only; elsewhere it does nothing, and children end when their sockets fall silent.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died between our start and the call above
        os._exit(1)


def open_process_handle(pid: int) -> int | None:
    """A file descriptor that becomes readable when process ``pid`` ends, or None where that cannot be had.

    The caller closes it. Raises `ProcessLookupError` if there is no such process any more.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:  # not permitted, or an old kernel: silence on the socket tells instead
        return None
