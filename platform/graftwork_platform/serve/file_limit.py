"""How many files and connections this process and its children may have open. Knows nothing of what opens them."""

from __future__ import annotations

import resource

MOST_OPEN_FILES = 1 << 20
"""Enough for any server; some systems allow so many that whatever walks them all would stand still."""


def raise_file_limit() -> int:
    """Raise the soft limit to the hard one; what it is now. Each connection takes a descriptor, and 1024 is the usual limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = MOST_OPEN_FILES if hard == unlimited else min(hard, MOST_OPEN_FILES)
    if soft == unlimited or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
