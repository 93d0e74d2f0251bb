"""Shard tasks on an executor of the caller's: processes, threads, MPI ranks, a Dask cluster.

Its machines must have the same folders under the same names, and the same libraries: each task checks that first.
A task returns its record. Its progress, and the order to stop, go through a file in OUT (`runfile`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from shardio.conversion.engines.runfile import RunFile, RunSlot
from shardio.conversion.engines.torchthreads import one_torch_thread
from shardio.conversion.plan import ShardTask, difference, library_versions
from shardio.conversion.records import ShardRecord, load_record
from shardio.conversion.sources.collection import Origin, Source
from shardio.conversion.task import Control, Report, Stopped, do_task
from shardio.errors import ConvertError, ShardioError
from shardio.format.layout import WORK_FOLDER
from shardio.system.opening import open_untrusted
from shardio.system.threads import run_apart

_PROGRESS_SECONDS = 0.5
# Tasks look every second, at a picture, whether they are to stop. One that is deep in an fsync is not waited for.
_GRACE_SECONDS = 2.0

GO_ON = "Run the same command again, which goes on with what is kept"


@dataclass(frozen=True)
class Terms:
    """Conditions under which a machine can take part. Picklable."""

    run_file: Path
    libraries: Mapping[str, str]
    origin: Origin
    source: Source
    """One source that stands for all."""
    fingerprint: str
    """The fingerprint that its origin gives where the conversion was started."""

    def check(self) -> None:
        """Raises ConvertError, with this machine's name, if it sees anything else."""
        host = socket.gethostname()
        if unlike := difference(library_versions(), self.libraries):
            raise ConvertError(
                f"{host} has {unlike}, where the conversion was started. These decide about pixels: install the same "
                "versions everywhere"
            )
        try:
            open_untrusted(self.run_file, os.O_RDWR).close()
        except OSError as error:
            raise ConvertError(
                f"{host} cannot write to {self.run_file}: {error.strerror}. OUT must be the same folder on all "
                "machines, under the same name"
            ) from None
        if self.origin.fingerprints((self.source,)) != [self.fingerprint]:
            raise ConvertError(
                f"{host} does not find {self.source.key!r} in the sources as it is where the conversion was started. "
                "SRC must be the same on all machines, under the same name"
            )


class Pool:
    """An executor to which tasks are given. It is never shut down here."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def check(self, terms: Terms) -> None:
        """Checks the terms on all machines at once, if the pool knows them. Each task checks them again."""

    def most_in_flight(self) -> int:
        """Returns how many tasks to give to it at a time: all, as executors keep what waits in this process."""
        return sys.maxsize

    def submit(self, call: Callable[..., ShardRecord], *arguments: object) -> Future[ShardRecord]:
        return self._executor.submit(call, *arguments)

    def cancel(self, futures: Iterable[Future[ShardRecord]]) -> None:
        """Cancels the futures whose tasks are not begun."""
        for future in futures:
            future.cancel()


def run_on_pool(tasks: Sequence[ShardTask], pool: Pool, report: Report, *, threads: int = 1) -> list[ShardRecord]:
    """Does all tasks, each with so many threads, and returns their records in the order of the tasks.

    `report` is called in the calling thread, the executor in another, since it may stay locked where a call is
    interrupted. If `report` raises, a task fails or on Ctrl-C, the work stops: tasks that were not begun are cancelled,
    those under way are told to stop, and save what they have done. ConvertError if the executor fails: finished shards
    stay.
    """
    if not tasks:
        return []
    finished: _Finished = queue.SimpleQueue()
    return run_apart(
        lambda tell: _run(tasks, pool, tell, threads, finished),
        report,
        partial(finished.put, None),
        "shardio-executor",
        _GRACE_SECONDS + _PROGRESS_SECONDS,
    )


_Finished = queue.SimpleQueue["Future[ShardRecord] | None"]
"""Futures that are done, and None for an order to stop."""


def _run(
    tasks: Sequence[ShardTask], pool: Pool, report: Report, threads: int, finished: _Finished
) -> list[ShardRecord]:
    run_file = RunFile(tasks[0].out / WORK_FOLDER, len(tasks))
    libraries = library_versions()

    def terms_of(task: ShardTask) -> Terms:
        first = task.sources[:1]
        return Terms(run_file.path, libraries, task.origin, first[0], *task.origin.fingerprints(first))

    records: dict[int, ShardRecord] = {}
    running: dict[Future[ShardRecord], int] = {}
    told = counts = np.zeros((len(tasks), 3), np.int64)
    try:
        pool.check(terms_of(tasks[0]))
        while len(records) < len(tasks):
            begun = len(records) + len(running)
            room = pool.most_in_flight() - len(running) if begun < len(tasks) else 0
            for number in range(begun, min(begun + room, len(tasks))):
                future = pool.submit(_work, tasks[number], number, terms_of(tasks[number]), threads)
                running[future] = number
                future.add_done_callback(finished.put)
            done: Future[ShardRecord] | None = None
            with contextlib.suppress(queue.Empty):
                done = finished.get(timeout=_PROGRESS_SECONDS)
                if done is None:
                    raise Stopped
            # The counts of a lost worker are not taken back, and not counted twice when the task is done again.
            counts = np.maximum(counts, run_file.read())
            if done is not None:
                number = running.pop(done)
                record = records[number] = _result(done, tasks[number], run_file)
                counts[number, :2] = record.num_sources, len(record.rejects)
            more = counts - told
            # Sources that the next worker has kept of a lost one's are of this call, and not kept from an earlier one.
            more[told[:, 0] > 0, 2] = 0
            report(*map(int, more.sum(axis=0)))
            told = counts.copy()
        return [records[number] for number in range(len(tasks))]
    except BrokenExecutor as error:
        raise ConvertError(
            f"a worker process died, perhaps killed for want of memory (see `dmesg`): {error} {GO_ON}"
        ) from None
    finally:
        pool.cancel(running)
        run_file.remove()
        deadline = time.monotonic() + _GRACE_SECONDS
        with contextlib.suppress(queue.Empty):
            while running:
                done = finished.get(timeout=max(0.0, deadline - time.monotonic()))
                if done is not None:
                    running.pop(done)


def _result(future: Future[ShardRecord], task: ShardTask, run_file: RunFile) -> ShardRecord:
    try:
        return future.result()
    except BrokenExecutor:
        raise
    except Exception as error:
        # Another process may have finished the same conversion, and removed the folder: FileNotFoundError tells that.
        run_file.read()
        if isinstance(error, (ShardioError, OSError)):
            raise
        what = "stopped unexpectedly: does its machine see OUT?" if isinstance(error, Stopped) else ""
        raise ConvertError(f"{task.name}: {what or f'{type(error).__name__}: {error}'}. {GO_ON}") from error


def _work(task: ShardTask, number: int, terms: Terms, threads: int) -> ShardRecord:
    """Runs in a worker. An executor may run a task again that a lost worker has finished."""
    terms.check()
    slot = RunSlot(terms.run_file, number)
    with one_torch_thread():
        return load_record(task) or do_task(task, Control(slot.report, slot.stopped, threads))
