"""Runs color and geometry steps on a batch by _pixels.c, in at most torch.get_num_threads() threads.

The results equal those of the torch operations in shardio.augment.pixels.
"""

from __future__ import annotations

import _thread
import queue
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.kernels.built import _pixels as _native

AVAILABLE = _native is not None
# Fewer images are not worth the start of a thread.
_MIN_IMAGES = 4


def in_slices(count: int, work: Callable[[slice], None]) -> None:
    """Calls `work` with slices that together cover `count` images, each slice in a thread, and waits for all calls.
    Uses at most torch.get_num_threads() threads. If calls failed, raises the first error after all calls have ended."""
    threads = min(torch.get_num_threads(), count // _MIN_IMAGES)
    if threads <= 1:
        work(slice(None))
        return
    bounds = [count * part // threads for part in range(threads + 1)]
    # Threads that end by themselves, even if an exception from a signal handler ends the wait for them.
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
    run(first)
    errors = [error for _ in (first, *others) if (error := results.get()) is not None]
    if errors:
        raise errors[0]


def run_steps(pixels: NDArray[np.uint8], codes: NDArray[np.uint8], values: NDArray[np.float64]) -> None:
    """Runs S steps on the B images `pixels`, uint8 (B, H, W, C), in place.

    Step s does the operation codes[s, b] to image b, with the numbers values[s, b]: uint8 (S, B) and float64 (S, B, n).
    Raises ValueError if the values of an operation are invalid. Then the images in the slice whose thread found the
    error are unchanged, and other images may have changed.
    """
    shape = pixels.shape[1:]

    def work(some: slice) -> None:
        _native.run(pixels[some], np.ascontiguousarray(codes[:, some]), np.ascontiguousarray(values[:, some]), *shape)

    in_slices(len(pixels), work)
