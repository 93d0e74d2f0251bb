"""Moves batches from storage to the consumer: reader -> gather threads -> slots -> device.

A pipeline exists as long as its loader. It does not know the order of samples: `shardio.loading.iterator` requests
batches.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.augment.program import Program
from shardio.cache.cached_split import warn_of_silence
from shardio.format.layout import LABEL_ROW, LABELS_NAME, MAX_SMALL_NBYTES
from shardio.kernels.finalized import Finalized
from shardio.loading.cuda import make_copier
from shardio.loading.gather import GatherThreads, Pending
from shardio.loading.options import Function, Options, find_parts
from shardio.loading.prefetch import MOST_AHEAD, DevicePrefetch, Tensors, traced
from shardio.loading.report import Counts, LoaderFacts, LoaderReport, Meter, Snapshot, report_thread
from shardio.loading.ring import Ring, Slot, new_slot
from shardio.loading.transform import TransformStep
from shardio.loading.world import min_local_ranks
from shardio.reading.choose import SplitSource, read_ahead_batches
from shardio.reading.mixed import AnySet, MixedReader, MixedSet, MixedSource
from shardio.reading.reader import GuardedReader, Reader, Request
from shardio.system.machine import memory_left, usable_cores
from shardio.system.threads import Ticker, close_at_exit

# Beyond this the memory bus is the limit on most machines, and other ranks of the node need cores too.
_MOST_THREADS = 4
# Gather threads that make pixels, too: each of them takes a core.
_MOST_MAKING_THREADS = 16
# Small batches share a slot, up to these bytes and this number: what Python does for each slot, in the consumer and in
# every thread, takes longer than to copy a batch of 256 pictures of 32 x 32 pixels. Slots of 8 MB
# had 0.8 to 0.9 of the rate at 64 x 64 (benchmarks/peers.py), and 32 MB gained no more.
_SHARED_NBYTES = 16 << 20
_MOST_PER_SLOT = 8


class Pipeline(Finalized):
    """Reads, copies and transforms batches of one split. Owns its reader, threads and slots. To be used by one thread.

    `close` also closes `source`. Any thread may call `close`, and call it again, also after an interrupted call.
    """

    closed = False
    _is_over = False
    _threads: GatherThreads
    _reports: Ticker | None = None

    def __init__(
        self,
        source: SplitSource | MixedSource,
        shards: AnySet,
        options: Options,
        indices: NDArray[np.int64] | None,
    ) -> None:
        """`indices` are the indices of the samples to read; None for all samples of the split."""
        self.options = options
        self.pid = os.getpid()
        self.consumer: dict[str, int] = {}
        """{"thread": identifier of the thread that is requesting a batch}; {} if no thread is."""
        self.parts = parts = find_parts(shards, options.arrays, options.images)
        if parts.image_shape is None and parts.label_row is None and not parts.rows and not options.return_indices:
            raise ValueError(
                f"{shards.path}, {shards.split}: batches would have no parts: leave out images=None, or name arrays="
            )
        self._copier = copier = make_copier(options.device)
        self._make_step = partial(TransformStep, options=options, parts=parts, shards=shards, indices=indices)
        self.transform = self._make_step(options.transform)
        results = self.transform.results
        # Enough slots for all batches under way at a time, so that a steady loop makes no new one.
        under_way = options.prefetch + 2 + (options.prefetch + MOST_AHEAD if copier else 0)
        made_nbytes = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in results)
        batch_nbytes = made_nbytes + options.batch_size * sum(row.nbytes for row in parts.rows.values())
        needed, left = batch_nbytes + 24 * options.batch_size, memory_left()  # with labels, indices and positions
        if left is not None and needed > left:
            raise ValueError(
                f"batch_size={options.batch_size}: a batch takes {needed:,} bytes, but {left:,} bytes of memory are "
                "left: use a smaller batch_size"
            )
        local_ranks = min_local_ranks(options.world)
        per_slot = min(_MOST_PER_SLOT, _SHARED_NBYTES // max(batch_nbytes, 1))
        self._most_per_slot = max(1, per_slot) if copier is None and options.prefetch else 1
        self._source = source
        self._shards = shards
        self.reader = self._make_reader(indices, local_ranks * under_way * batch_nbytes)
        make = copier.new_slot if copier else new_slot
        shape = (0, 0, 0) if self.transform.makes_pixels else parts.stored_shape
        slot_size = self._most_per_slot * options.batch_size
        self._ring = Ring(under_way, lambda: make(slot_size, shape, parts.rows))
        self.read_ahead = read_ahead_batches(batch_nbytes, left)
        """The number of batches to announce to the reader in addition to the batches under way."""
        cores, most = usable_cores(), _MOST_THREADS
        if self.transform.makes_pixels:
            cores, most = cores // local_ranks, _MOST_MAKING_THREADS
        self.num_threads = options.num_threads or max(1, min(most, cores), self.reader.num_threads)
        self.facts = LoaderFacts(self.num_threads, usable_cores(), options.prefetch, options.world)
        close_at_exit(self)
        # Last, as nothing else of the above has to be closed.
        self._threads = GatherThreads(self.num_threads)
        self.meter = Meter(self._threads.no_core_seconds)
        if options.report_every is not None:
            self._reports = report_thread(self, self.meter, self.facts, options.report_every)
            self._reports.begin()

    def _make_reader(self, indices: NDArray[np.int64] | None, reserved: int) -> Reader:
        """Returns a reader of the samples `indices`; None for all. `reserved`: bytes that this node's batches take."""
        source, shards, options = self._source, self._shards, self.options
        tables = (*([] if self.parts.image_shape is None else [""]), *self.parts.arrays)
        sources = source.sources if isinstance(source, MixedSource) else (source,)
        sets = shards.sets if isinstance(shards, MixedSet) else (shards,)
        counts = [len(one) for one in sets] if indices is None else [len(np.unique(indices))]
        nbytes = [
            count * sum(one.table_of(name).row_nbytes for name in tables)
            for one, count in zip(sets, counts, strict=True)
        ]
        readers: list[Reader] = []
        for each, one, count, mine in zip(sources, sets, counts, nbytes, strict=True):
            # What the others will take of the page cache is not there for this one.
            reader = each.make_reader(options.io, count, tables, reserved + sum(nbytes) - mine)
            readers.append(reader if options.check == "off" else GuardedReader(reader, one, each.make_second()))
        return MixedReader(shards, readers) if isinstance(shards, MixedSet) else readers[0]

    def close(self) -> None:
        """Closes everything. Each step is done even if an earlier step is interrupted, say by a Ctrl-C."""
        self.closed = True
        if self._is_over or not hasattr(self, "_threads"):  # its making was interrupted
            return
        with contextlib.ExitStack() as steps:  # the last comes first
            steps.callback(self._source.close)
            steps.callback(self._ring.clear)
            steps.callback(self._close_threads)
            if self._reports is not None:
                steps.callback(self._reports.close)
            # Before the threads are waited for: one that is asking a storage that does not answer gives up.
            steps.callback(self.reader.close)
            steps.callback(self._source.stop)
        self._is_over = True

    def finalize(self) -> None:
        self.close()

    def _close_threads(self) -> None:
        place, opens_files = str(self._shards.path), "mmap" not in self.reader.name
        warn_of_silence(place, self._threads.close(), opens_files=opens_files)

    def set_transform(self, function: Function | None) -> None:
        """Sets the transform of iterators that begin from now on. Frees the slots of the transform before."""
        self.transform = self._make_step(function)
        self._ring.clear()

    def batches_per_slot(self) -> int:
        """Returns how many batches of the epoch that has begun are gathered together, into one slot: more than one if
        batches are small and only copied, from memory, to a caller on the CPU."""
        return self._most_per_slot if self.transform.function is None and self.reader.min_part_nbytes else 1

    def new_prefetch(self) -> DevicePrefetch | None:
        """Returns a new queue that copies the batches of one epoch to the device; None if batches stay on the CPU."""
        return DevicePrefetch(self._copier, self._ring, self.meter.counts) if self._copier else None

    def request(self, indices: NDArray[np.int64], program: Program | None) -> Request:
        """Returns the request to read a batch. With `program`, it is for the regions that the program needs."""
        parts = self.parts
        has_images, has_label = parts.image_shape is not None, parts.label_row == LABEL_ROW
        request = Request(indices, has_images, has_label, tuple(parts.arrays))
        if isinstance(self._shards, MixedSet):
            sources = self._shards.sources_of(indices)
            request = replace(request, order=np.argsort(sources, kind="stable"))
        if program is None or not self.transform.makes_pixels:
            return request
        return replace(request, windows=program.windows, channels=program.source[2], make=program.make)

    def announce(self, request: Request, given_up: list[None]) -> None:
        """Announces a batch that will be submitted soon to the reader: see `GatherThreads.announce`."""
        self._threads.announce(self.reader, request, given_up)
        self.meter.counts.read_ahead_batches += 1

    def submit(self, request: Request, program: Program | None, head_start_seconds: float) -> Pending:
        """Starts to gather a batch into a slot. Returns the pending batch. See `GatherThreads.submit`."""
        slot = self._ring.acquire()
        if program is None or request.make is None:
            slot.lay_out(((len(slot.labels), *self.parts.stored_shape), np.uint8))
        else:
            slot.lay_out(*program.results)
        return self._threads.submit(self.reader, request, slot, head_start_seconds)

    def abandon(self, pending: Pending) -> None:
        """Gives up a batch. Its slot returns to the ring once no thread writes to it. Does not wait."""
        pending.abandon(self._ring.release)

    def wait_for(self, pending: Pending) -> Slot:
        """Waits until a batch is gathered. Returns its slot, or raises the error of gathering it."""
        meter = self.meter
        meter.begin_wait()
        try:
            with traced("shardio.wait"):
                slot = pending.wait()
        finally:
            meter.end_wait()
        seconds, cpu_seconds = pending.seconds()
        meter.counts.gather_seconds += seconds
        meter.counts.gather_cpu_seconds += cpu_seconds
        return slot

    def finish_on_host(self, slot: Slot, size: int, program: Program | None) -> tuple[torch.dtype, ...]:
        """Does for a gathered batch of `size` samples what a GPU cannot do, and returns the dtypes of its views: see
        `TransformStep.on_host`. After an error, the slot returns to the ring."""
        try:
            return self.transform.on_host(slot, size, program)
        except BaseException:
            self._ring.release(slot)
            raise

    def lend(self, slot: Slot, sizes: Sequence[int]) -> list[Tensors]:
        """Returns the batches of a slot, of `sizes` samples each, on the CPU. Images and arrays are views of the slot,
        which returns to the ring when the last view is freed. Labels and small arrays are copies, so a caller who
        collects them over an epoch does not keep slots."""
        whole, batches, start = self._ring.lend(slot, sum(sizes)), [], 0
        for size in sizes:
            some = slice(start, start := start + size)
            images = whole if len(sizes) == 1 else self._ring.lend_beside(whole, whole[some])
            views = [images, *(self._ring.lend_beside(images, view[some]) for view in slot.views[1:])]
            more = {}
            for name, array in slot.more.items():
                is_small = name == LABELS_NAME or array[0].nbytes <= MAX_SMALL_NBYTES
                values = array[some].copy() if is_small else self._ring.lend_beside(images, array[some])
                more[name] = torch.from_numpy(values)
            labels = torch.from_numpy(slot.labels[some].copy())
            indices = torch.from_numpy(slot.indices[some].copy()) if self.options.return_indices else None
            # numpy's transpose is cheaper than torch's permute, which is an operation of torch.
            pictures = tuple(torch.from_numpy(view.transpose(0, 3, 1, 2)) for view in views)
            batches.append(Tensors(pictures if len(views) > 1 else pictures[0], labels, indices, more))
        return batches

    def report(self) -> LoaderReport:
        """Returns the report on the time since the pipeline was made."""
        return LoaderReport.between(Snapshot(Counts()), self.meter.snapshot(), self.facts)

    def stats(self) -> dict[str, Any]:
        """Returns the counters of `ShardLoader.stats`, except for "shares" and "device"."""
        read = self.reader.counts()
        report = self.report()
        return {
            **vars(report.counts),
            "waited": report.waited,
            "limited_by": report.stage,
            "num_threads": self.num_threads,
            "slots": self._ring.num_made,
            "slots_free": self._ring.num_free,
            "io": self.reader.name,
            "read_nbytes": read.nbytes,
            "read_retries": read.retries,
            "read_ahead_hits": read.found / read.looked_for if read.looked_for else None,
            "roi": self.transform.makes_pixels,
            **self._source.describe(),
        }
