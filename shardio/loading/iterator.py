"""The iterator of a ShardLoader: keeps the batches of one epoch under way, and counts each that was received.

order -> drawn, and announced -> gathered into a slot -> copied to the device -> transformed -> received
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from shardio.augment.cut import Cut
from shardio.loading.gather import Hints, Pending
from shardio.loading.headstart import head_start_seconds
from shardio.loading.pipeline import Pipeline
from shardio.loading.prefetch import DevicePrefetch, Tensors
from shardio.loading.request import Request
from shardio.loading.ring import Drawn, Slot
from shardio.loading.state import Place, Position
from shardio.order.sampler import Sampler
from shardio.system.eager import eager


class Batch(NamedTuple):
    """A batch that was drawn: the samples `indices`, and their numbers for random numbers, int64 (B,) each."""

    indices: NDArray[np.int64]
    counters: NDArray[np.int64]


class Flow:
    """Keeps `prefetch` batches under way beyond the one that is due, and gives them in order.

    Everything is driven by the consumer's calls, so there is nothing to wait for at an end: a flow that is dropped in
    the middle leaves its batches to be finished, and its slots return to the ring. To be used by one thread.
    """

    _device: DevicePrefetch | None

    def __init__(self, pipeline: Pipeline, sampler: Sampler, epoch: int, prefetch: int, *, repeats: bool) -> None:
        self._pipeline = pipeline
        self._sampler = sampler
        self._repeats = repeats
        self._batches = sampler.batches(epoch)
        self._num_drawn = 0
        self._epoch = epoch
        self._prefetch = prefetch
        self._announces = pipeline.begin_epoch()
        self._last_step = pipeline.last_step(epoch)
        self._hints = Hints()
        # Drawn from the order, and announced if that is of use.
        self._coming: deque[tuple[Batch, Request]] = deque()
        self._pending: deque[tuple[Batch, Request, Pending]] = deque()
        # The batches on the device that were not taken.
        self._started: deque[tuple[Batch, Request, Drawn]] = deque()
        self._device = pipeline.new_prefetch()
        self._head_start_seconds = 0.0

    def __del__(self) -> None:
        if hasattr(self, "_device") and not sys.is_finalizing():  # nor where its making was interrupted
            self.abandon()

    def abandon(self) -> None:
        """Leave batches that will not be taken, and their slots. May be called again."""
        self._hints.abandon()
        while self._pending:
            self._pipeline.abandon(self._pending.popleft()[2])
        if self._device is not None:
            self._device.close()

    def take(self) -> tuple[Tensors, Drawn, Cut | None]:
        """Waits for the batch that is due. Returns it, with the cut that its images are of, if they are; or raises what
        its gathering has raised."""
        self._head_start_seconds = head_start_seconds(self._pipeline.meter.step_seconds())
        self._gather_ahead()
        self._read_again()
        if self._device is None:
            slot, request = self._gathered()
            return *self._pipeline.lend(slot, len(request)), request.cut
        if not self._device:
            self._start_copy(self._device)
        tensors, (_, request, drawn) = self._device.take(), self._started.popleft()
        # Copies of batches that are ready overlap what the consumer does with the one it gets now.
        # An error waits until its batch is due.
        while (
            self._pending
            and self._pending[0][2].done()
            and not self._pending[0][2].failed()
            and len(self._device) < max(1, self._prefetch)
        ):
            self._start_copy(self._device)
        self._gather_ahead()
        return tensors, drawn, request.cut

    def _start_copy(self, device: DevicePrefetch) -> None:
        batch = self._pending[0][0]
        slot, request = self._gathered()
        self._started.append((batch, request, slot.drawn(len(request))))
        device.start(slot, len(request))

    def _read_again(self) -> None:
        """If another transform was set meanwhile, gathers all batches again of which only what the first one sees was
        read."""
        if not any(self._is_stale(request) for _, request, _ in (*self._started, *self._pending)):
            return
        before, self._pending = self._pending, deque()
        for batch, request, _ in self._started:
            self._submit(batch, request)
        while self._started:
            assert self._device is not None
            self._device.take()
            self._started.popleft()
        for batch, request, pending in before:
            if self._is_stale(request):
                self._pipeline.abandon(pending)
                self._submit(batch, request)
            else:
                self._pending.append((batch, request, pending))

    def _is_stale(self, request: Request) -> bool:
        return request.split is not None and request.split is not self._pipeline.transform.split

    def _gathered(self) -> tuple[Slot, Request]:
        _, request, pending = self._pending[0]
        slot = self._pipeline.collect(pending)
        self._pending.popleft()
        return slot, request

    def _gather_ahead(self) -> None:
        """Keep batches under way, and announce some that come after them."""
        # The batch that is due is announced first, so that all of it is asked for before a thread waits for a part.
        self._draw(self._prefetch + 1 - len(self._pending))
        while self._coming and len(self._pending) <= self._prefetch:
            self._submit(*self._coming.popleft())
        if self._announces:
            self._draw(self._pipeline.read_ahead)

    def _draw(self, count: int) -> None:
        """Draws batches until `count` are coming, or none are left."""
        while len(self._coming) < count:
            indices = next(self._batches, None)
            if indices is None:
                return
            batch = Batch(indices, _counters(self._sampler, self._num_drawn, indices, self._repeats))
            self._num_drawn += 1
            request = self._request(batch)
            if self._announces:
                self._pipeline.announce(request, self._hints)
            self._coming.append((batch, request))

    def _submit(self, batch: Batch, request: Request) -> None:
        if self._is_stale(request):
            request = self._request(batch)
        # The first is begun at once, and so is one while that before it is not ready.
        is_ahead = self._pending[-1][2].done() if self._pending else bool(self._started)
        head_start = self._head_start_seconds if is_ahead else 0.0
        self._pending.append((batch, request, self._pipeline.submit(request, self._last_step, head_start)))

    def _request(self, batch: Batch) -> Request:
        return self._pipeline.request(batch.indices, batch.counters, self._epoch)


class LoaderIterator(Iterator[tuple[Any, ...]]):
    """Gives the batches of one epoch, once.

    Threads may take turns, if one call of `next` ends before another begins. A call while another thread's call is
    under way, be it for another iterator of the loader, raises RuntimeError and changes nothing.
    """

    def __init__(self, pipeline: Pipeline, position: Position, *, prefetch: int, return_indices: bool) -> None:
        self._pipeline = pipeline
        self._position = position
        self._prefetch = prefetch
        self._return_indices = return_indices
        self._token = object()
        self._flow: Flow | None = None
        self._failed = False
        self._take_place()

    def _take_place(self) -> None:
        self._place = self._position.next
        self._sampler = self._position.rest()
        self._step = 0
        self._remaining = self._sampler.num_batches

    def _begin(self) -> Flow:
        """Begins with the first batch: asking for an iterator changes nothing, as Lightning asks too often."""
        self._take_place()
        epoch = self._place.epoch
        self._pipeline.meter.begin_epoch(epoch)
        flow = Flow(self._pipeline, self._sampler, epoch, self._prefetch, repeats=self._position.repeats)
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
        return self._remaining if self._flow else self._position.rest().num_batches

    @eager
    def __next__(self) -> tuple[Any, ...]:
        pipeline = self._pipeline
        if os.getpid() != pipeline.pid:
            raise RuntimeError("this ShardLoader was made before fork(): make it in the process that uses it")
        # No lock: an exception of a signal handler may come before the `finally` is over, and what it leaves here does
        # not stop this thread.
        me = threading.get_ident()
        if pipeline.consumer.setdefault("thread", me) != me:
            raise RuntimeError(
                "next() of a ShardLoader was called in two threads at the same time, which could give samples twice: "
                "call it in one thread and hand batches to the others, or give each thread a loader"
            )
        try:
            return self._next()
        finally:
            pipeline.consumer.pop("thread", None)

    def _next(self) -> tuple[Any, ...]:
        pipeline, flow = self._pipeline, self._flow
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

    def _next_of(self, flow: Flow) -> tuple[Any, ...]:
        """Counts the batch last: an error before that, or a Ctrl-C, leaves it to be read again."""
        pipeline, position, sampler, place = self._pipeline, self._position, self._sampler, self._place
        step = self._step
        tensors, drawn, cut = flow.take()
        counters = _counters(sampler, step, drawn.indices, position.repeats)
        start = time.perf_counter()
        images, labels, more = pipeline.transform(tensors, drawn, counters, place.epoch, cut)
        pipeline.meter.counts.transform_seconds += time.perf_counter() - start
        batch = (images, labels, tensors.indices) if self._return_indices else (images, labels)
        if more:
            batch = (*batch, more)
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


def _counters(sampler: Sampler, step: int, indices: NDArray[np.int64], repeats: bool) -> NDArray[np.int64]:
    """Returns the numbers of a batch's samples for random numbers: their own; or, where one sample `repeats`, and may
    come more than once in an epoch, their positions in its order."""
    if not repeats:
        return indices
    start, stop = sampler.bounds(step)
    return np.arange(start, stop) % sampler.num_samples
