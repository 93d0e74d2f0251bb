"""A thread that reports, every so many seconds, whether a training loop waits for data."""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from shardio.errors import printable
from shardio.loading.meter import Meter
from shardio.loading.report import Report, Source
from shardio.system.threads import DaemonThread

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

To = Callable[[Report], object]
# A thread that waits for a server that does not answer is left behind, and ends with the process.
_GRACE_SECONDS = 2.0

_Ends = queue.SimpleQueue[Any]


class Reporter:
    """Calls `to`, in a thread of its own, with a report of every `seconds` in which batches were asked for.

    The thread ends with `close`, and when `owner` dies. It holds no reference to `owner`.
    """

    def __init__(self, owner: object, meter: Meter, source: Source, seconds: float, to: To) -> None:
        self._ends: _Ends = queue.SimpleQueue()
        owner_ends = weakref.ref(owner, self._ends.put)
        self._thread = DaemonThread(partial(_run, self._ends, owner_ends, meter, source, seconds, to), "shardio-report")

    def begin(self) -> None:
        self._thread.begin()

    def close(self) -> None:
        """Ends the thread. May be called again."""
        self._ends.put(None)
        with contextlib.suppress(queue.Empty):
            self._thread.wait(_GRACE_SECONDS)


def _run(ends: _Ends, owner: object, meter: Meter, source: Source, seconds: float, to: To) -> None:
    """`owner` is only kept here."""
    before = meter.snapshot()
    while True:
        try:
            ends.get(timeout=seconds)
        except queue.Empty:
            pass
        else:
            return
        after = meter.snapshot()
        report = Report.between(before, after, source)
        if report.counts.batches or report.is_stuck:
            try:
                to(report)
            except Exception as error:  # the caller's: training goes on
                _print(f"shardio: no more reports: {type(error).__name__}: {error}")
                return
        before = after


class Lines:
    """Prints one line to stderr for each report.

    Where torch.distributed has been initialised, ranks give their reports to its store, and rank 0 prints its own line
    and one for all. Otherwise each rank prints its own.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        # Loaders are made in the same order on all ranks.
        self._name = f"shardio/reports/{next(self._numbers)}"

    def __call__(self, report: Report) -> None:
        source = report.source
        store = find_store(source.world_size)
        if store is not None:
            with contextlib.suppress(Exception):  # the store's server has gone, say: training itself will tell
                store.set(f"{self._name}/{source.rank}", json.dumps(_told(report)))
                if source.rank:
                    return
                _print(f"shardio: {report.line}")
                keys = [f"{self._name}/{rank}" for rank in range(source.world_size)]
                told = {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if store.check([key])}
                _print(f"shardio: {line_of(told, source.world_size)}")
                return
        _print(f"shardio: {report.line}")


def find_store(world_size: int) -> Store | None:
    """Returns the store of torch.distributed; None if it has not been initialised, or not for these ranks."""
    distributed: Any = sys.modules.get("torch.distributed")
    if world_size == 1 or distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    if distributed.get_world_size() != world_size:
        return None
    store: Store = distributed.distributed_c10d._get_default_store()
    return store


def _told(report: Report) -> list[Any]:
    return [report.images_per_second, report.waited + report.transformed, report.stage]


def line_of(told: dict[int, list[Any]], world_size: int) -> str:
    """Returns one line about the last reports of several ranks."""
    rate = sum(images for images, _, _ in told.values())
    waited = {rank: share for rank, (_, share, _) in told.items()}
    most = max(waited, key=lambda rank: waited[rank])
    count = f"{world_size} ranks" if len(told) == world_size else f"{len(told)} of {world_size} ranks"
    shares = f"waited {min(waited.values()):.1%} to {waited[most]:.1%}"
    stage = told[most][2]
    return f"{count}: {rate:,.0f} images/s, {shares}" + (f", rank {most} by {stage}" if stage != "consumer" else "")


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed, or there is none
        print(printable(line), file=sys.stderr, flush=True)
