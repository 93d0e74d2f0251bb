"""Runs color and geometry steps on a batch by _pixels.c, in as many threads as torch has.

shardio.augment.pixels defines the results by operations of torch.
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
    """Calls `work` with slices that cover `count` images, in as many threads as torch has, and waits for all calls.

    Then raises the first error of a call.
    """
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
    """Runs S steps on `pixels`, (B, H, W, C), in place. `codes` is (S, B), `values` (S, B, n).

    Raises ValueError if an operation cannot take its values. Then some images are unchanged: the slice of the batch
    whose thread found the error.
    """
    shape = pixels.shape[1:]

    def work(some: slice) -> None:
        _native.run(pixels[some], np.ascontiguousarray(codes[:, some]), np.ascontiguousarray(values[:, some]), *shape)

    in_slices(len(pixels), work)
