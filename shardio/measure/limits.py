"""The limits of this machine: how fast it moves samples by memcpy, by np.take, from the disk, and to the GPU.

Each limit is an endless generator: each step moves some images and yields their number. Memory, threads and descriptors
of a limit exist from its first step until it is closed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle
from queue import SimpleQueue

import numpy as np
import torch

from shardio.reading.choose import alignment_of
from shardio.reading.shardset import ShardSet
from shardio.system.machine import filesystem_kind
from shardio.system.opening import naming, open_regular
from shardio.system.pour import aligned_empty, set_direct

Steps = Generator[int, None, None]

# The slots of a loader with the default prefetch: two ahead, one being filled, two with the consumer.
SLOTS_IN_TURN = 5
# Too large for any cache, so the C library bypasses the caches.
BLOCK_NBYTES = 256 << 20
DIRECT_THREADS = 8
# Of a larger set only the first files are read: on many machines a process may open 1024.
_MAX_FILES = 256
# Bytes that a thread reads per report, and reports per draw of samples. Reporting and drawing take time.
_DIRECT_STEP_NBYTES = 1 << 20
_STEPS_DRAWN = 64
# The cost of waiting for the device is spread over these copies.
_COPIES_IN_A_STEP = 32


def memcpy(image_nbytes: int) -> Steps:
    """Copies one large block of memory, a whole number of images, to another block. Yields the number of images."""
    num_images = max(1, BLOCK_NBYTES // image_nbytes)
    source, target = (aligned_empty((num_images, image_nbytes)) for _ in range(2))
    source.fill(1)
    while True:
        np.copyto(target, source)
        yield num_images


def take(shards: ShardSet, batch_size: int, seed: int) -> Steps:
    """Copies a batch of random samples of a random shard by np.take(out=, mode="clip"). Yields the batch size.

    Batches go into the same number of slots as the loader's, one after the other. This is the fastest way to copy a
    batch without native code. If samples have no pixels, all their arrays are copied.
    """
    rng = np.random.default_rng(seed)
    tables = [shards.mapped(name).file_rows for name in shards.main_tables]
    sizes = [np.array(list(map(len, arrays))) for arrays in tables]
    shapes = [(batch_size, arrays[0].shape[1]) for arrays in tables]
    for slot in cycle([list(map(aligned_empty, shapes)) for _ in range(SLOTS_IN_TURN)]):
        for arrays, counts, out in zip(tables, sizes, slot, strict=True):
            array = arrays[rng.choice(len(arrays), p=counts / counts.sum())]
            np.take(array, rng.integers(0, len(array), batch_size), axis=0, out=out, mode="clip")
        yield batch_size


def why_no_direct_reads(shards: ShardSet) -> str | None:
    """Returns the reason why `direct_reads` cannot work on this set; None if it can."""
    if not shards.has_pixels:
        return "the set has no pixels"
    alignment = alignment_of(shards)
    nbytes = shards.row_nbytes
    if alignment is None:
        return f"O_DIRECT does not work on {filesystem_kind(shards.path) or 'this filesystem'}"
    if nbytes % alignment:
        return f"samples of {nbytes:,} bytes are not whole sectors of {alignment} bytes"
    return None


def direct_reads(shards: ShardSet, seed: int) -> Steps:
    """Reads random samples from the disk in DIRECT_THREADS threads. Yields the number of samples, about a MiB, each
    time that a thread has read so many. Each sample is read by one preadv with O_DIRECT, so it comes from the disk even
    if it is in the page cache. Raises OSError if `why_no_direct_reads` returns a reason."""
    nbytes = shards.row_nbytes
    paths = [shards.path_of(shard) for shard in shards.content.shards]
    num_samples = len(shards.pixels) if len(paths) <= _MAX_FILES else int(shards.pixels.starts[_MAX_FILES])
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
                        raise OSError(errno.EIO, f"expected {nbytes} bytes from byte {offset} on, read {count} bytes")
                    if done % num_images == 0:
                        finished.put(num_images)
        except BaseException as error:
            if isinstance(error, OSError):
                error.filename = paths[number]
            finished.put(error)

    with ExitStack() as stack:
        descriptors: list[int] = []
        for path in paths[:_MAX_FILES]:
            file, _ = open_regular(path)
            descriptors.append(stack.enter_context(file).fileno())
            with naming(path):
                set_direct(descriptors[-1])
        pool = stack.enter_context(ThreadPoolExecutor(DIRECT_THREADS, "shardio-limit"))
        stack.callback(stopped.append, None)  # the first to be called: then the pool waits, and then files are closed
        for thread in range(DIRECT_THREADS):
            pool.submit(read, thread, descriptors)
        while True:
            result = finished.get()
            if isinstance(result, BaseException):
                raise result
            yield result


def pinned_copies(device: torch.device, batch_size: int, image_nbytes: int) -> Steps:
    """Copies batches from pinned memory to a CUDA device. Yields the number of images after every 32 batches."""
    shape = (batch_size, image_nbytes)
    sources = cycle([torch.empty(shape, dtype=torch.uint8, pin_memory=True) for _ in range(SLOTS_IN_TURN)])
    target = torch.empty(shape, dtype=torch.uint8, device=device)
    while True:
        for _ in range(_COPIES_IN_A_STEP):
            target.copy_(next(sources), non_blocking=True)
        synchronize(device)
        yield _COPIES_IN_A_STEP * batch_size


def synchronize(device: torch.device) -> None:
    """Waits until a CUDA device has finished all its work. Returns at once for the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
