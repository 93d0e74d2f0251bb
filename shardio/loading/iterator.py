"""The iterator of a ShardLoader: reads the batches of an epoch ahead, and counts the batches received.

The stages of a batch:

sample indices -> announced to the reader -> gathered into a slot -> copied to the device -> transformed -> received
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
import torch
from numpy.typing import NDArray

from shardio.augment.boxes import Draws, Looks
from shardio.augment.program import Program
from shardio.kernels.finalized import Finalized
from shardio.loading.agree import Agreement
from shardio.loading.gather import Pending, head_start_seconds
from shardio.loading.pipeline import Pipeline
from shardio.loading.prefetch import DevicePrefetch, Tensors
from shardio.loading.ring import Slot
from shardio.loading.state import Place, Position
from shardio.loading.world import warn_if_alone
from shardio.order.mixture import passes_of
from shardio.order.sampler import Sampler
from shardio.reading.reader import Request
from shardio.system.eager import eager


class _Due(NamedTuple):
    """A batch that was not taken yet, with the random numbers for its samples, `draws` (None without a transform), and
    what a transform of shardio makes of it, `program` (None for other functions). `dtypes` has the dtype of the
    images of each view if `TransformStep.on_host` has finished them; otherwise ()."""

    request: Request
    draws: Draws | None
    program: Program | None
    dtypes: tuple[torch.dtype, ...] = ()


class Flow(Finalized):
    """The batches of one epoch in order: `take` returns the next batch, and keeps `prefetch` further batches under way.

    All work is started by the consumer's calls, so ending early needs no wait: if a flow is dropped in the middle of an
    epoch, gather threads finish its batches, and the slots return to the ring. To be used by one thread.
    """

    _device: DevicePrefetch | None

    def __init__(self, pipeline: Pipeline, sampler: Sampler, epoch: int) -> None:
        self.sampler = sampler
        self.epoch = epoch
        """The epoch that the order and the transform's random numbers depend on."""
        self._pipeline = pipeline
        self._batches = enumerate(sampler.batches(epoch))
        self._announces = pipeline.reader.begin_epoch()
        # Has an entry once no more batches are wanted: gather threads then announce none.
        self._given_up: list[None] = []
        # Drawn from the order, and announced if that is of use.
        self._coming: deque[_Due] = deque()
        # Why no more are drawn: the error of the batch after those. At most one.
        self._errors: list[Exception] = []
        self._pending: deque[tuple[list[_Due], Pending]] = deque()
        # The error of what the host does for the batch after the started ones. At most one.
        self._late: list[Exception] = []
        # The batches on the device that were not taken; on the CPU, those of the last slot.
        self._started: deque[_Due] = deque()
        self._lent: deque[Tensors] = deque()
        self._device = pipeline.new_prefetch()
        self._per_slot = pipeline.batches_per_slot()

    def finalize(self) -> None:
        if hasattr(self, "_device") and not sys.is_finalizing():  # nor where its making was interrupted
            self.abandon()

    def abandon(self) -> None:
        """Drops all batches that were not taken, and returns their slots to the ring. May be called again."""
        self._given_up.append(None)
        self._lent.clear()
        while self._pending:
            self._pipeline.abandon(self._pending.popleft()[1])
        if self._device is not None:
            self._device.close()

    def take(self) -> tuple[Tensors, _Due]:
        """Waits for the next batch. Returns its tensors and its _Due, or raises the error of gathering the batch."""
        if self._lent:
            return self._lent.popleft(), self._started.popleft()
        prefetch = self._pipeline.options.prefetch
        head_start = head_start_seconds(self._pipeline.meter.step_seconds())
        self._gather_ahead(head_start)
        if self._device is None:
            slot, several = self._gathered()
            self._lent.extend(self._pipeline.lend(slot, [len(due.request) for due in several]))
            self._started.extend(several)
            return self._lent.popleft(), self._started.popleft()
        if not self._device:
            if self._late:
                raise self._late.pop()
            self._start_copy(self._device)
        tensors, due = self._device.take(), self._started.popleft()
        # Copies of batches that are ready overlap what the consumer does with the one it gets now.
        # An error waits until its batch is due.
        while (
            self._pending
            and not self._late
            and self._pending[0][1].done()
            and not self._pending[0][1].failed()
            and len(self._device) < max(1, prefetch)
        ):
            try:
                self._start_copy(self._device)
            except Exception as error:
                self._late.append(_without_frames(error))
        self._gather_ahead(head_start)
        return tensors, due

    def _start_copy(self, device: DevicePrefetch) -> None:
        slot, (due,) = self._gathered()
        dtypes = self._pipeline.finish_on_host(slot, len(due.request), due.program)
        self._started.append(due._replace(dtypes=dtypes))
        device.start(slot, len(due.request))

    def _gathered(self) -> tuple[Slot, list[_Due]]:
        if not self._pending:
            raise self._errors.pop()
        several, pending = self._pending[0]
        try:
            slot = self._pipeline.wait_for(pending)
        except Exception:
            if len(several) == 1:
                raise
        else:
            self._pending.popleft()
            return slot, several
        # Each by itself, so that the error comes with its batch.
        self._pending.popleft()
        self._pipeline.abandon(pending)
        alone = [([due], self._submit([due])) for due in several]
        self._pending.extendleft(reversed(alone))
        return self._gathered()

    def _submit(self, several: list[_Due], head_start: float = 0.0) -> Pending:
        due = several[0]
        if len(several) > 1:
            indices = np.concatenate([each.request.indices for each in several])
            due = _Due(self._pipeline.request(indices, None), None, None)
        return self._pipeline.submit(due.request, due.program, head_start)

    def _gather_ahead(self, head_start: float) -> None:
        """Submits batches until enough are under way, and announces later batches to the reader. Gathering a batch that
        is not urgent starts after `head_start` seconds."""
        per_slot = self._per_slot
        most = 1 + -(-self._pipeline.options.prefetch // per_slot)  # slots under way
        # The batch that is due is announced first, so that all of it is asked for before a thread waits for a part.
        self._draw(per_slot * (most - len(self._pending)))
        while self._coming and len(self._pending) < most:
            # The first is begun at once, and so is one while that before it is not ready.
            is_ahead = self._pending[-1][1].done() if self._pending else bool(self._started)
            several = [self._coming.popleft() for _ in range(min(per_slot, len(self._coming)))]
            self._pending.append((several, self._submit(several, head_start if is_ahead else 0.0)))
        if self._announces:
            self._draw(self._pipeline.read_ahead)

    def _draw(self, count: int) -> None:
        """Takes batches from the order until `count` batches wait to be submitted, or the epoch has no more, and
        announces them if the reader wants that. An error is kept, and raised when its batch is due."""
        pipeline = self._pipeline
        while len(self._coming) < count and not self._errors:
            step, indices = next(self._batches, (0, None))
            if indices is None:
                return
            draws = program = None
            try:
                if pipeline.transform.function is not None:
                    draws = _draws(self.sampler, pipeline.options.seed, self.epoch, step, indices)
                    program = pipeline.transform.program(indices, draws, pipeline.reader.whole_lines)
                request = pipeline.request(indices, program)
            except Exception as error:  # it is raised when the batch is due
                self._errors.append(_without_frames(error))
                return
            if self._announces:
                pipeline.announce(request, self._given_up)
            self._coming.append(_Due(request, draws, program))


class LoaderIterator(Finalized, Iterator[tuple[Any, ...]]):
    """Iterates over the batches of one epoch, once. Threads may take turns to call `next`. A call during another
    thread's call, even on another iterator of the same loader, raises RuntimeError and changes nothing."""

    def __init__(self, pipeline: Pipeline, position: Position, agreement: Agreement | None) -> None:
        self._pipeline = pipeline
        self._position = position
        self._agreement = agreement
        self._flow: Flow | None = None
        self._place = position.next
        self._remaining = 0

    def finalize(self) -> None:
        if hasattr(self, "_token") and not sys.is_finalizing():
            self._position.leave(self._token, is_dropped=True)

    def _begin(self) -> Flow:
        """Begins the epoch, and returns its Flow. The first `next` does this, as Lightning calls `iter()` too often."""
        position = self._position
        if not self._pipeline.meter.counts.batches:
            warn_if_alone(self._pipeline.options.world)
        if self._agreement is not None:
            self._agreement.check(position, self._pipeline)
        self._place, sampler = position.next, position.rest()
        self._remaining = sampler.num_batches
        self._pipeline.meter.begin_epoch()
        # In an endless order, epochs are stretches of one.
        flow = Flow(self._pipeline, sampler, self._place.epoch if sampler.length is None else 0)
        self._token = position.begin()
        self._flow = flow
        return flow

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an iterator of a ShardLoader cannot be pickled or copied: state_dict() of the loader has its place"
        )

    @property
    def epoch(self) -> int:
        """The epoch of the batches. Before the first batch is requested, the epoch that the loader would begin now."""
        return self._place.epoch if self._flow else self._position.next.epoch

    @property
    def is_running(self) -> bool:
        """Whether the epoch has begun and has batches left."""
        return self._flow is not None and self._remaining > 0

    def __len__(self) -> int:
        """The number of batches left."""
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
        if flow is not None and not self._remaining:
            self._position.leave(self._token, at_end=True)
            raise StopIteration
        if flow is None or pipeline.closed:
            raise RuntimeError("this ShardLoader was closed: make another loader to read more batches")
        try:
            return self._next_of(flow)
        except BaseException as error:
            self._remaining = 0  # as with a generator: after an error the iteration is over,
            self._position.leave(self._token)  # and its end is not that of the epoch
            flow.abandon()
            if isinstance(error, StopIteration):  # which would end the caller's loop as if the epoch were over
                raise RuntimeError("the transform raised StopIteration") from error
            raise

    def _next_of(self, flow: Flow) -> tuple[Any, ...]:
        """Returns the next batch. Counts it last, so a state excludes a batch that failed or was interrupted."""
        pipeline, position, place, sampler = self._pipeline, self._position, self._place, flow.sampler
        tensors, due = flow.take()
        start = time.perf_counter()
        images, labels, more = pipeline.transform(tensors, due.request.indices, due.draws, due.program, due.dtypes)
        pipeline.meter.counts.transform_seconds += time.perf_counter() - start
        batch = (
            *((images,) if pipeline.parts.image_shape else ()),
            *((labels,) if labels is not None else ()),
            *((tensors.indices,) if pipeline.options.return_indices else ()),
            *((more,) if more else ()),
        )
        views = tensors.images if isinstance(tensors.images, tuple) else (tensors.images,)
        nbytes = sum(tensor.nbytes for tensor in (*views, *tensors.more.values()))
        pipeline.meter.received(len(tensors.labels), nbytes)
        padded = sampler.num_padded(sampler.num_batches - self._remaining)
        consumed = min(place.consumed + sampler.global_batch_size, sampler.num_samples)
        self._remaining -= 1
        self._place = Place(place.epoch, consumed, place.batch + 1)
        position.num_padded = padded
        position.receive(self._token, self._place, has_more=self._remaining > 0)
        return batch


def _without_frames(error: Exception) -> Exception:
    """Returns `error` after removing its traceback, and the tracebacks of the errors that led to it: their frames would
    refer to the Flow that keeps the error."""
    part: BaseException | None = error
    while part is not None:
        part = part.with_traceback(None).__context__
    return error


def _draws(sampler: Sampler, seed: int, epoch: int, step: int, indices: NDArray[np.int64]) -> Draws:
    """Returns the random numbers of the samples `indices` of the rank's batch at `step`. Their counters are sample
    indices; or, where a sample may come more than once in an epoch, their positions in the order."""
    start, stop = sampler.bounds(step)
    positions = np.arange(start, stop) % sampler.num_samples
    comes_once = not sampler.order.redraws and sampler.repeats == 1
    passes = passes_of(sampler.order, epoch, positions) if sampler.repeats == 1 else None
    return Draws(seed, epoch, indices if comes_once else positions, looks=Looks(indices, passes))
