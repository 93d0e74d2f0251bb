"""One torch thread while pictures are resized: they are too small to split over torch's own threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_lock = threading.Lock()
_inside = 0
_before = 1


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """Inside the block, the calling thread and the threads that it starts compute in one thread each.

    Any number of threads may be inside at once; the number that was set before the first of them is set again.
    """
    global _inside, _before
    with _lock:
        # A thread takes the number over that was set last anywhere when it first asks for it, and not when it sets it.
        number = torch.get_num_threads()
        if not _inside:
            _before = number
        _inside += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            torch.set_num_threads(_before)
