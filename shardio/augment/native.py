"""The work of a kernel in C on a batch, split over as many threads as torch has."""

from __future__ import annotations

import _thread
import queue
from collections.abc import Callable
from itertools import pairwise

import torch

# Fewer images are not worth the start of a thread.
_LEAST_IMAGES = 4


def in_slices(count: int, work: Callable[[slice], None]) -> None:
    """Calls `work` with slices that make up all of `count` images, in several threads at once, and waits for them.

    Raises what `work` raised in one of them.
    """
    threads = min(torch.get_num_threads(), count // _LEAST_IMAGES)
    if threads <= 1:
        work(slice(None))
        return
    bounds = [count * part // threads for part in range(threads + 1)]
    # Threads that end by themselves, also if an exception from a signal handler ends the wait for them.
    results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(some: slice) -> None:
        try:
            work(some)
        except BaseException as error:
            results.put(error)
        else:
            results.put(None)

    first, *others = (slice(*pair) for pair in pairwise(bounds))
    for some in others:
        _thread.start_new_thread(run, (some,))
    work(first)
    for _ in others:
        if (error := results.get()) is not None:
            raise error
