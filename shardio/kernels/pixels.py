"""Runs color and geometry steps on images by _pixels.c, and divides work on a batch among threads."""

from __future__ import annotations

import _thread
import queue
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.kernels import _pixels as _native
from shardio.kernels.rowcopy import check_bytes

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
    """Runs S steps on the B images `pixels`, uint8 (B, H, W, C), C-contiguous, in place, in the calling thread.

    Step s does the operation codes[s, b] to image b, with the numbers values[s, b]: uint8 (S, B) and float64 (S, B, n).
    Raises ValueError if the values of an operation are invalid; then the images are unchanged.
    """
    check_bytes(pixels)
    _native.run(pixels, np.ascontiguousarray(codes), np.ascontiguousarray(values), *pixels.shape[1:])
