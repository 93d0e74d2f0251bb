"""The limits of this machine for moving samples without a loader: by memcpy, by np.take, from the disk, to the GPU.

Each limit is an endless generator of steps: it moves some images, yields how many, and so on. Its memory, threads and
descriptors are there from its first step until it is closed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import cycle
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.format.layout import sample_nbytes
from shardio.reading.choose import alignment_of
from shardio.reading.shardset import ShardSet
from shardio.system.direct import aligned_empty, set_direct
from shardio.system.machine import filesystem_kind
from shardio.system.opening import naming, open_regular

Steps = Generator[int, None, None]

# A loader with its default prefetch has as many: two ahead, one being filled, two in the consumer's hands.
SLOTS_IN_TURN = 5
# A block is so large that no cache holds it, and that the C library bypasses the caches.
BLOCK_NBYTES = 256 << 20
DIRECT_THREADS = 8
# A set of more files is read from the first ones alone, as a process may open 1024 on many machines.
_MOST_FILES = 256
# A thread reads so much before it reports, and reports so often before it draws more samples: both take it time.
_DIRECT_STEP_NBYTES = 1 << 20
_STEPS_DRAWN = 64
# The cost of a wait for the device is spread over so many copies.
_COPIES_IN_A_STEP = 32


def memcpy(image_nbytes: int) -> Steps:
    """Copies one large block, of whole images, to another: there are no scattered samples to find."""
    num_images = max(1, BLOCK_NBYTES // image_nbytes)
    source, target = (aligned_empty((num_images, image_nbytes)) for _ in range(2))
    source.fill(1)
    while True:
        np.copyto(target, source)
        yield num_images


def slots(batch_size: int, image_nbytes: int) -> list[NDArray[np.uint8]]:
    """Returns memory like the loader's slots: aligned, and as many as it uses in turn."""
    return [aligned_empty((batch_size, image_nbytes)) for _ in range(SLOTS_IN_TURN)]


def one_buffer(batch_size: int, image_nbytes: int) -> list[NDArray[np.uint8]]:
    """Returns memory as numpy allocates it: not aligned, and if it is small, always in the processor's caches."""
    return [np.empty((batch_size, image_nbytes), np.uint8)]


def take(shards: ShardSet, batch_size: int, make: Callable[[int, int], list[NDArray[np.uint8]]], seed: int) -> Steps:
    """Does np.take(out=, mode="clip") of random samples of one random shard, into the buffers of `make` in turn.

    No copy of a batch without native code costs less. Samples are whole: np.take knows no windows.
    """
    rng = np.random.default_rng(seed)
    arrays = shards.shard_arrays
    sizes = np.array([len(array) for array in arrays])
    for out in cycle(make(batch_size, sample_nbytes(shards.sample_shape))):
        array = arrays[rng.choice(len(arrays), p=sizes / sizes.sum())]
        np.take(array, rng.integers(0, len(array), batch_size), axis=0, out=out, mode="clip")
        yield batch_size


def why_no_direct_reads(shards: ShardSet) -> str | None:
    """Returns the reason why `direct_reads` cannot work, or None if it can."""
    alignment = alignment_of(shards)
    nbytes = sample_nbytes(shards.sample_shape)
    if alignment is None:
        return f"O_DIRECT does not work on {filesystem_kind(shards.path) or 'this filesystem'}"
    if nbytes % alignment:
        return f"samples of {nbytes:,} bytes are not whole sectors of {alignment} bytes"
    return None


def direct_reads(shards: ShardSet, seed: int) -> Steps:
    """Reads random whole samples in DIRECT_THREADS threads, each by one preadv with O_DIRECT into its thread's buffer.

    They come from the disk, whatever is in the page cache. Raises OSError where `why_no_direct_reads` gives a reason.
    """
    nbytes = sample_nbytes(shards.sample_shape)
    paths = [shards.path_of(shard) for shard in shards.content.shards]
    num_samples = len(shards.pixels) if len(paths) <= _MOST_FILES else int(shards.pixels.starts[_MOST_FILES])
    num_images = max(1, _DIRECT_STEP_NBYTES // nbytes)
    finished: SimpleQueue[int | BaseException] = SimpleQueue()
    stopped: list[None] = []

    def read(thread: int, descriptors: Sequence[int]) -> None:
        number = 0
        try:
            rng = np.random.default_rng((seed, thread))
            buffer = aligned_empty((nbytes,)).data
            while True:
                located = shards.pixels.locate(rng.integers(0, num_samples, _STEPS_DRAWN * num_images))
                for done, (number, offset) in enumerate(zip(*map(np.ndarray.tolist, located), strict=True), 1):
                    if stopped:
                        return
                    if (count := os.preadv(descriptors[number], [buffer], offset)) != nbytes:
                        raise OSError(errno.EIO, f"only {count} of {nbytes} bytes came from byte {offset} on")
                    if done % num_images == 0:
                        finished.put(num_images)
        except BaseException as error:
            if isinstance(error, OSError):
                error.filename = paths[number]
            finished.put(error)

    with (
        _opened_direct(paths[:_MOST_FILES]) as descriptors,
        ThreadPoolExecutor(DIRECT_THREADS, "shardio-limit") as pool,
    ):
        try:
            for thread in range(DIRECT_THREADS):
                pool.submit(read, thread, descriptors)
            while True:
                result = finished.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            stopped.append(None)


@contextmanager
def _opened_direct(paths: Sequence[str]) -> Iterator[list[int]]:
    with ExitStack() as stack:
        descriptors: list[int] = []
        for path in paths:
            file, _ = open_regular(path)
            descriptors.append(stack.enter_context(file).fileno())
            with naming(path):
                set_direct(descriptors[-1])
        yield descriptors


def pinned_copies(device: torch.device, batch_size: int, image_nbytes: int) -> Steps:
    """Copies batches from pinned memory to a CUDA device, one after the other, and does nothing else."""
    shape = (batch_size, image_nbytes)
    sources = cycle([pinned_empty(shape) for _ in range(SLOTS_IN_TURN)])
    target = device_empty(shape, device)
    while True:
        for _ in range(_COPIES_IN_A_STEP):
            target.copy_(next(sources), non_blocking=True)
        synchronize(device)
        yield _COPIES_IN_A_STEP * batch_size


def pinned_empty(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8, pin_memory=True)


def device_empty(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8, device=device)


def synchronize(device: torch.device) -> None:
    """Waits until the device has done everything that it was asked for. On the CPU that is always so."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
