"""The iterator of a ShardLoader: keeps the batches of one epoch under way, and counts each that was received.

order -> drawn, and announced -> gathered into a slot -> copied to the device -> transformed -> received
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from shardio.loading.gather import Hints, Pending
from shardio.loading.out import write_batch
from shardio.loading.pipeline import Pipeline
from shardio.loading.prefetch import DevicePrefetch, Tensors
from shardio.loading.resident import Resident
from shardio.loading.ring import Drawn, Slot
from shardio.loading.state import Place, Position
from shardio.order.windows import Windows
from shardio.system.eager import eager

# Pieces of a resident split that are under way while one is brought to the device.
_PIECES_AHEAD = 2


class Flow:
    """Keeps `prefetch` batches under way beyond the one that is due, and gives them in order.

    Everything is driven by the consumer's calls, so there is nothing to wait for at an end: a flow that is dropped in
    the middle leaves its batches to be finished, and its slots return to the ring. To be used by one thread.
    """

    _device: DevicePrefetch | None

    def __init__(self, pipeline: Pipeline, batches: Iterator[NDArray[np.int64]], epoch: int, prefetch: int) -> None:
        self._pipeline = pipeline
        self._batches = batches
        self._epoch = epoch
        self._prefetch = prefetch
        self._announces = pipeline.begin_epoch()
        self._last_step = pipeline.last_step(epoch)
        self._hints = Hints()
        # Drawn from the order, and announced if that is of use.
        self._coming: deque[tuple[NDArray[np.int64], Windows | None]] = deque()
        self._pending: deque[Pending] = deque()
        # The samples of the batches on the device that were not taken.
        self._drawn: deque[Drawn] = deque()
        self._device = pipeline.new_prefetch()

    def __del__(self) -> None:
        if hasattr(self, "_device") and not sys.is_finalizing():  # nor where its making was interrupted
            self.abandon()

    def abandon(self) -> None:
        """Leave batches that will not be taken, and their slots. May be called again."""
        self._hints.abandon()
        while self._pending:
            self._pipeline.abandon(self._pending.popleft())
        if self._device is not None:
            self._device.close()

    def take(self) -> tuple[Tensors, Drawn]:
        """Waits for the batch that is due. Returns it, or raises what its gathering has raised."""
        self._gather_ahead()
        if self._device is None:
            return self._pipeline.lend(*self._gathered())
        if not self._device:
            self._start_copy(self._device)
        tensors, drawn = self._device.take(), self._drawn.popleft()
        # Copies of batches that are ready overlap what the consumer does with the one it gets now.
        # An error waits until its batch is due.
        while (
            self._pending
            and self._pending[0].done()
            and not self._pending[0].failed()
            and len(self._device) < max(1, self._prefetch)
        ):
            self._start_copy(self._device)
        self._gather_ahead()
        return tensors, drawn

    def _start_copy(self, device: DevicePrefetch) -> None:
        slot, size = self._gathered()
        self._drawn.append(slot.drawn(size))
        device.start(slot, size)

    def _gathered(self) -> tuple[Slot, int]:
        pending = self._pending[0]
        slot = self._pipeline.collect(pending)
        self._pending.popleft()
        return slot, pending.size

    def _gather_ahead(self) -> None:
        """Keep batches under way, and announce some that come after them."""
        # The batch that is due is announced first, so that all of it is asked for before a thread waits for a part.
        self._draw(self._prefetch + 1 - len(self._pending))
        while self._coming and len(self._pending) <= self._prefetch:
            indices, windows = self._coming.popleft()
            self._pending.append(self._pipeline.submit(indices, windows, self._last_step))
        if self._announces:
            self._draw(self._pipeline.read_ahead)

    def _draw(self, count: int) -> None:
        """Draws batches until `count` are coming, or none are left."""
        while len(self._coming) < count:
            indices = next(self._batches, None)
            if indices is None:
                return
            crop = self._pipeline.crop
            windows = crop.windows(self._epoch, indices) if crop else None
            if self._announces:
                self._pipeline.announce(indices, windows, self._hints)
            self._coming.append((indices, windows))


class ResidentFlow:
    """Gives the batches of one epoch in order, out of the device's memory. The first one waits until that is filled."""

    def __init__(
        self, pipeline: Pipeline, resident: Resident, batches: Iterator[NDArray[np.int64]], epoch: int
    ) -> None:
        self._pipeline = pipeline
        self._batches = batches
        self._epoch = epoch
        self._resident = resident
        # As many pieces are under way as keep threads and bus busy.
        self._filling = None if resident.is_filled else Flow(pipeline, resident.pieces(), epoch, _PIECES_AHEAD)

    def take(self) -> tuple[Tensors, Drawn]:
        """Returns the batch that is due, or raises what filling the memory has raised."""
        if (filling := self._filling) is not None:
            self._resident.fill(lambda: filling.take()[0])
            self.abandon()
            self._pipeline.free_slots()
        return self._pipeline.take_resident(next(self._batches), self._epoch)

    def abandon(self) -> None:
        """Leave what has not been brought to the device. May be called again."""
        if self._filling is not None:
            self._filling.abandon()
            self._filling = None


class LoaderIterator(Iterator[tuple[Any, ...]]):
    """Gives the batches of one epoch, once."""

    def __init__(self, pipeline: Pipeline, position: Position, *, prefetch: int, return_indices: bool) -> None:
        self._pipeline = pipeline
        self._position = position
        self._prefetch = prefetch
        self._return_indices = return_indices
        self._token = object()
        self._flow: Flow | ResidentFlow | None = None
        self._failed = False
        self._take_place()

    def _take_place(self) -> None:
        self._place = self._position.next
        self._sampler = self._position.rest()
        self._step = 0
        self._remaining = self._sampler.num_batches

    def _begin(self) -> Flow | ResidentFlow:
        """Begins with the first batch: asking for an iterator changes nothing, as Lightning asks too often."""
        self._take_place()
        epoch = self._place.epoch
        self._pipeline.meter.begin_epoch(epoch)
        batches, resident = self._sampler.batches(epoch), self._pipeline.resident
        flow: Flow | ResidentFlow
        if resident is None:
            flow = Flow(self._pipeline, batches, epoch, self._prefetch)
        else:
            flow = ResidentFlow(self._pipeline, resident, batches, epoch)
        self._position.begin(self._token)
        self._flow = flow
        return flow

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an iterator of a ShardLoader cannot be pickled or copied: state_dict() of the loader says where it is"
        )

    @property
    def epoch(self) -> int:
        """The epoch of the batches. Until the first batch is asked for, the one that the loader would begin now."""
        return self._place.epoch if self._flow else self._position.next.epoch

    def __len__(self) -> int:
        """Batches still to come."""
        if not self._flow:
            self._take_place()
        return self._remaining

    @eager
    def __next__(self) -> tuple[Any, ...]:
        pipeline, flow = self._pipeline, self._flow
        if os.getpid() != pipeline.pid:
            raise RuntimeError("this ShardLoader was made before fork(): make it in the process that uses it")
        if flow is None and not pipeline.closed:
            flow = self._begin()
        if not self._remaining:
            if not self._failed:
                self._position.receive(self._token, Place(self._place.epoch + 1, 0))
            raise StopIteration
        if flow is None or pipeline.closed:
            raise RuntimeError("this ShardLoader was closed")
        try:
            return self._next_of(flow)
        except BaseException:
            self._remaining = 0  # as with a generator: after an error the iteration is over
            self._failed = True
            flow.abandon()
            raise

    def _next_of(self, flow: Flow | ResidentFlow) -> tuple[Any, ...]:
        """Counts the batch last: an error before that, or a Ctrl-C, leaves it to be read again."""
        pipeline, position, sampler, place = self._pipeline, self._position, self._sampler, self._place
        step = self._step
        tensors, drawn = flow.take()
        counters = self._positions(step) if position.repeats else drawn.indices
        start = time.perf_counter()
        images, labels, more = pipeline.transform(tensors, drawn, counters, place.epoch)
        pipeline.meter.counts.transform_seconds += time.perf_counter() - start
        batch = (images, labels, tensors.indices) if self._return_indices else (images, labels)
        if more:
            batch = (*batch, more)
        if pipeline.out is not None:
            batch = write_batch(pipeline.out, batch, is_short=len(tensors.labels) < sampler.batch_size)
        nbytes = tensors.images.nbytes + sum(tensor.nbytes for tensor in tensors.more.values())
        pipeline.meter.received(len(tensors.labels), nbytes)
        repeats = sampler.num_repeats(step)
        consumed = min(place.consumed + sampler.global_batch_size, sampler.num_samples)
        self._step += 1
        self._remaining -= 1
        self._place = Place(place.epoch, consumed)
        position.num_repeats = repeats
        position.receive(self._token, self._place)
        return batch

    def _positions(self, step: int) -> NDArray[np.int64]:
        """Returns the positions of the batch's samples in the order of the epoch, each of which comes once."""
        start, stop = self._sampler.bounds(step)
        return np.arange(start, stop) % self._sampler.num_samples
