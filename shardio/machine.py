"""What this machine gives to this process."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that this process may run on: fewer than the machine has where a job scheduler binds processes."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
