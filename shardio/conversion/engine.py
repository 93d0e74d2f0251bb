"""Runs the tasks of a conversion: in this process, in worker processes, or on a Dask cluster.

Other machines must have the same folders under the same paths, and the same libraries: each task checks that first.
A task returns its record. While it works, it shares a file in OUT, the run file, with the process that started it: the
task writes its counts to its own row of the file, about once a second, and stops when the file is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.process import current_process
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.options import ConvertOptions, count_workers
from shardio.conversion.plan import ShardTask, difference, library_versions
from shardio.conversion.records import ShardRecord, load_record
from shardio.conversion.sources.collection import Origin, Source
from shardio.conversion.task import Report, do_task
from shardio.errors import ConvertError, ShardioError
from shardio.system.machine import memory_left
from shardio.system.opening import open_untrusted, read_untrusted
from shardio.system.threads import Stop

if TYPE_CHECKING:
    from distributed import Client

# Decoding, resizing and hashing run without the GIL, so one process keeps a few cores busy. The rest, a tenth of the
# time of an image, holds the GIL: more threads would wait for each other.
THREADS_PER_PROCESS = 4
# Tasks to submit ahead. Each takes a megabyte or more of the scheduler's memory, but no worker should wait, and a
# cluster that adapts to its load grows only while tasks wait.
_TASKS_PER_THREAD = 2
_FEWEST_TASKS = 64
# For errors of one machine, say of its mount of the filesystem. Lost workers do not count.
_RETRIES = 2
_NAMED_WORKERS = 3
_COUNTS = np.dtype(("<u4", 2))  # sources done, of these refused
_PROGRESS_SECONDS = 0.5
# A thousand tasks must not keep the file server busy with this.
_LOOK_SECONDS = 1.0

RESUME = "Run the same command again: finished shards are kept"
_GUARD = 'a script that calls shardio.convert must do so under `if __name__ == "__main__":`'


@dataclass(frozen=True)
class Engine:
    """Runs tasks in this process, in worker processes, or on a Dask cluster. Raises ValueError if `serial` is true and
    `options` asks a scheduler for several cores for each shard."""

    options: ConvertOptions
    """Only `workers` and `scheduler` are used. With a `scheduler`, `workers` is the number of cores for each shard."""
    serial: bool = False
    """Whether each worker has one thread, and a single worker runs in the calling thread: for Python datasets."""

    def __post_init__(self) -> None:
        workers = self.options.workers or 1
        if self.serial and self.options.scheduler is not None and workers > 1:
            raise ValueError(
                f"on a cluster, one thread makes each shard of a dataset: workers must be 1 or None; found {workers}"
            )

    def check(self) -> None:
        """Raises ValueError if the scheduler's address is invalid, and ConvertError if no scheduler answers.

        Also raises ConvertError in a worker process that imports the script of a conversion: it would convert again.
        """
        if getattr(current_process(), "_inheriting", False):
            raise ConvertError(f"{_GUARD}: worker processes import the script")
        if self.options.scheduler is not None:
            with open_cluster(self.options.scheduler):
                pass

    def run(self, tasks: Sequence[ShardTask], report: Report, run_file: Path) -> list[ShardRecord]:
        """Runs all tasks, and returns their records in the order of the tasks. `report` is called in the calling
        thread, with counts of sources: see `Report`. The work stops if `report` raises, if a task fails, or on Ctrl-C.
        `run_file` is the path of the run file, which is created only for tasks in other processes."""
        if not tasks:
            return []
        if self.options.scheduler is not None:
            with open_cluster(self.options.scheduler) as cluster:
                return run_on_pool(tasks, cluster, report, run_file, self.options.workers or 1)
        workers = 1 if self.serial and self.options.workers is None else count_workers(self.options.workers)
        processes = min(-(-workers // (1 if self.serial else THREADS_PER_PROCESS)), len(tasks))
        threads = 1 if self.serial else workers // processes  # rather an idle core than one more than was asked for
        if processes > 1:
            with _OwnPool(processes) as pool:
                return run_on_pool(tasks, pool, report, run_file, threads)
        return [do_task(task, report, threads) for task in tasks]


# --- a pool of workers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Terms:
    """The conditions that a machine must meet to work on a conversion. Picklable.

    It must have the same libraries and the same sources, and OUT under the same path.
    """

    run_file: Path
    libraries: Mapping[str, str]
    origin: Origin
    source: Source
    """The source that `check` compares."""
    fingerprint: str
    """The fingerprint of `source` on the machine where the conversion was started."""

    def check(self) -> None:
        """Raises ConvertError, with this machine's name, if this machine does not meet the conditions."""
        host = socket.gethostname()
        if unlike := difference(library_versions(), self.libraries):
            raise ConvertError(
                f"{host}: expected the library versions of the machine that started the conversion (here), found "
                f"{unlike}. Versions decide the pixels: install the same versions everywhere"
            )
        try:
            open_untrusted(self.run_file, os.O_RDWR).close()
        except OSError as error:
            raise ConvertError(
                f"{host} cannot write to {self.run_file}: {error.strerror}. OUT must be the same folder on all "
                "machines, under the same path"
            ) from None
        if self.origin.fingerprints((self.source,)) != [self.fingerprint]:
            raise ConvertError(
                f"{host} does not find {self.source.key!r} in SRC, or the file has another size or time than on the "
                "machine that started the conversion. SRC must be the same on all machines, under the same path"
            )


class Pool:
    """Submits tasks to an executor. Never shuts the executor down."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def check(self, terms: Terms) -> None:
        """Raises ConvertError if a machine of the pool does not meet the terms. Does nothing here: tasks check, too."""

    def most_in_flight(self) -> int:
        """Returns the maximum number of unfinished tasks to submit. No limit here: an executor queues tasks itself."""
        return sys.maxsize

    def submit(self, call: Callable[..., ShardRecord], *arguments: object) -> Future[ShardRecord]:
        return self._executor.submit(call, *arguments)

    def do_alone(self, task: ShardTask, number: int, terms: Terms) -> ShardRecord:
        """Runs a task again that was running when the pool broke, while no other task runs. Returns the task's record.
        `number` is the task's row in the run file. Raises BrokenExecutor if the pool cannot run it, as here."""
        raise BrokenExecutor("the pool cannot be started again.")

    def forget(self, future: Future[ShardRecord]) -> None:
        """Releases a future whose result was taken."""

    def cancel(self, futures: Iterable[Future[ShardRecord]]) -> None:
        """Cancels the futures whose tasks have not begun."""
        for future in futures:
            future.cancel()


def run_on_pool(
    tasks: Sequence[ShardTask], pool: Pool, report: Report, run_file: Path, threads: int
) -> list[ShardRecord]:
    """Runs all tasks, each with `threads` threads, and returns their records in the order of the tasks.

    Creates the run file at the path `run_file`, and calls `report` in this thread with what the tasks write there. The
    work stops if `report` raises, if a task fails, or on Ctrl-C: tasks that have not begun are cancelled, and the run
    file is removed, which stops running tasks. Raises ConvertError if the pool fails.
    """
    counts = told = np.zeros((len(tasks), 2), np.int64)
    run_file.write_bytes(bytes(len(tasks) * _COUNTS.itemsize))
    libraries = library_versions()

    def terms_of(task: ShardTask) -> Terms:
        first = task.sources[:1]
        return Terms(run_file, libraries, task.origin, first[0], *task.origin.fingerprints(first))

    records: dict[int, ShardRecord] = {}
    running: dict[Future[ShardRecord], int] = {}
    finished: queue.SimpleQueue[Future[ShardRecord]] = queue.SimpleQueue()
    try:
        pool.check(terms_of(tasks[0]))
        while len(records) < len(tasks):
            begun = len(records) + len(running)
            room = pool.most_in_flight() - len(running) if begun < len(tasks) else 0
            for number in range(begun, min(begun + room, len(tasks))):
                try:
                    future = pool.submit(_work, tasks[number], number, terms_of(tasks[number]), threads)
                except BrokenExecutor as error:  # a worker was killed since the last look
                    future = Future()
                    future.set_exception(error.with_traceback(None))
                running[future] = number
                future.add_done_callback(finished.put)
            done: Future[ShardRecord] | None = None
            with contextlib.suppress(queue.Empty):
                done = finished.get(timeout=_PROGRESS_SECONDS)
            # The counts of a lost worker are not taken back, and not counted twice when the task is done again.
            counts = np.maximum(counts, _read_counts(run_file))
            if done is not None:
                number = running.pop(done)
                try:
                    made = {number: _result(done, tasks[number], run_file)}
                    pool.forget(done)
                except BrokenExecutor:
                    lost = [number, *running.values()]
                    running, finished = {}, queue.SimpleQueue()
                    made = {one: pool.do_alone(tasks[one], one, terms_of(tasks[one])) for one in lost}
                records |= made
                for number, record in made.items():
                    counts[number] = record.num_sources, len(record.rejects)
            report(*map(int, (counts - told).sum(axis=0)))
            told = counts.copy()
        return [records[number] for number in range(len(tasks))]
    except BrokenExecutor as error:
        raise ConvertError(
            f"a worker process died, perhaps killed for lack of memory (see `dmesg`): {error} {RESUME}, with fewer "
            f"workers if memory is short. ({_GUARD[0].upper()}{_GUARD[1:]})"
        ) from None
    finally:
        try:
            pool.cancel(running)  # before a task stops, and its worker begins the next
        finally:
            run_file.unlink(missing_ok=True)


def _read_counts(run_file: Path) -> NDArray[np.int64]:
    """Returns the counts in the run file, int64 (tasks, 2): sources done, and sources refused among them. Raises
    FileNotFoundError if the run file is gone."""
    return np.frombuffer(read_untrusted(run_file), _COUNTS.base).astype(np.int64).reshape(-1, 2)


def _result(future: Future[ShardRecord], task: ShardTask, run_file: Path) -> ShardRecord:
    try:
        return future.result()
    except BrokenExecutor:
        raise
    except Exception as error:
        # FileNotFoundError: another process has finished the same conversion, and removed the folder.
        _read_counts(run_file)
        if isinstance(error, (ShardioError, OSError)):
            raise
        what = "stopped unexpectedly, perhaps because its machine does not see OUT" if isinstance(error, Stop) else ""
        raise ConvertError(f"{task.name}: {what or f'{type(error).__name__}: {error}'}. {RESUME}") from error


# --- processes of this machine ----------------------------------------------------------------------------------------


class _OwnProcesses(ProcessPoolExecutor):
    """Spawned worker processes, which inherit no locks or threads. If the `with` block fails, they are killed."""

    def __init__(self, count: int) -> None:
        super().__init__(count, multiprocessing.get_context("spawn"), end_with_parent)

    def submit(self, *call: Any, **options: Any) -> Future[Any]:
        # Ctrl-C is for this process alone: submitting starts workers, which inherit the blocked signal.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(*call, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for process in list((self._processes or {}).values()):
                process.kill()  # a shard that is not finished is made again in any case
        self.shutdown(cancel_futures=True)


class _OwnPool(Pool, contextlib.AbstractContextManager["_OwnPool"]):
    """Worker processes of this machine. If the kernel kills one, the tasks that ran are done again, one by one.

    The kernel also kills for a neighbor's memory. So an image is refused only if a process that does nothing else is
    killed twice while it decodes this image.
    """

    def __init__(self, count: int) -> None:
        super().__init__(_OwnProcesses(count))
        self._count = count

    def __exit__(self, *error: Any) -> None:
        self._executor.__exit__(*error)

    def most_in_flight(self) -> int:
        return self._count  # so the tasks that the pool has are those that run

    def do_alone(self, task: ShardTask, number: int, terms: Terms) -> ShardRecord:
        self._executor.shutdown()
        self._executor = _OwnProcesses(self._count)
        ends: list[tuple[int, int | None]] = []
        while True:
            with _OwnProcesses(1) as executor:
                future = executor.submit(_work, task, number, terms, 1, True)
                (process,) = executor._processes.values()
                # Not by `result`, whose traceback would be part of a cycle that keeps pipes open.
                if not isinstance(future.exception(), BrokenExecutor):
                    return _result(future, task, terms.run_file)
            # The executor's thread has waited for the process.
            place, code = end = int(_read_counts(terms.run_file)[number, 0]), process.exitcode
            # Without pixels, a task does not count one by one.
            is_at_image = task.fit is not None and place < len(task.sources)
            if not is_at_image or len(ends) > 2 * len(task.killed) + 3:
                raise BrokenExecutor(f"{task.name}: the process that made it alone ended with exit code {code}.")
            if code == -signal.SIGKILL and ends[-1:] == [end]:
                left = f"expected to decode it in the {memory_left() or 0:,} bytes of memory that are left"
                found = f"{left}, found that the kernel kills a process that does nothing else, twice"
                task = replace(task, killed={**task.killed, task.sources[place].key: found})
            ends.append(end)


def end_with_parent() -> None:
    """Initializes a worker process, so it exits when its parent process ends, even if the parent is killed."""
    # The parent would wait while the interpreter takes torch apart.
    atexit.register(os._exit, 0)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="shardio-watch", daemon=True).start()


# --- a Dask cluster ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_cluster(address: str) -> Iterator[Pool]:
    """Yields a pool of the workers of the scheduler at `address`. Workers may come and go; without any, tasks wait.

    Raises ValueError if `address` is invalid, ConvertError if dask.distributed is missing or no scheduler answers.
    """
    try:
        import dask.config
        from distributed import Client
        from distributed.comm.addressing import resolve_address
        from distributed.comm.core import CommClosedError
    except ImportError:
        raise ConvertError(
            "a conversion on a Dask cluster needs dask.distributed: pip install 'shardio[dask]'"
        ) from None
    try:
        resolve_address(address)  # a client that was given nonsense complains, and hangs, when it is finalized
        client = Client(address, name="shardio", set_as_default=False)
    except ValueError as error:
        raise ValueError(f"scheduler must be an address such as tcp://host:8786; found {address!r}: {error}") from None
    except OSError as error:
        raise ConvertError(f"{address}: expected a Dask scheduler, found none: {error}") from None
    # A shard of small images has many sources, and they have to travel: nothing to be warned of.
    with client, dask.config.set({"distributed.admin.large-graph-warning-threshold": "1TB"}):
        try:
            yield _Cluster(client)
        except CommClosedError as error:
            raise ConvertError(f"{address}: the scheduler is gone: {error}. {RESUME}") from None


class _Cluster(Pool):
    def __init__(self, client: Client) -> None:
        self._client = client

    def check(self, terms: Terms) -> None:
        answers = self._client.run(terms.check, on_error="return")
        found = [f"{worker}: {answer}" for worker, answer in answers.items() if answer is not None]
        if found:
            more = f"; and {len(found) - _NAMED_WORKERS:,} more" if len(found) > _NAMED_WORKERS else ""
            named = "; ".join(found[:_NAMED_WORKERS])
            raise ConvertError(f"{len(found):,} of {len(answers):,} workers cannot take part: {named}{more}")

    def most_in_flight(self) -> int:
        threads: int = sum(self._client.nthreads().values())
        return max(_FEWEST_TASKS, _TASKS_PER_THREAD * threads)

    def submit(self, call: Callable[..., ShardRecord], *arguments: object) -> Future[ShardRecord]:
        # Not by `client.get_executor()`: its futures never end if the scheduler goes away while it sends a result.
        # The result is no Future of the standard library, but has all that is asked of one.
        future: Any = self._client.submit(call, *arguments, pure=False, retries=_RETRIES)
        return cast("Future[ShardRecord]", future)

    def forget(self, future: Future[ShardRecord]) -> None:
        # Or its finalizer does so, and swallows a Ctrl-C that comes meanwhile.
        future.release()  # type: ignore[attr-defined]

    def cancel(self, futures: Iterable[Future[ShardRecord]]) -> None:
        self._client.cancel(list(futures))


# --- in the worker ----------------------------------------------------------------------------------------------------


def _work(task: ShardTask, number: int, terms: Terms, threads: int, alone: bool = False) -> ShardRecord:
    """Runs a task in a worker and returns its record. `number` is the task's row in the run file.

    With `alone`, counts are written after each source, not once a second. If the task already has a record, returns
    that record: Dask runs a task again if it loses the worker that finished the task. A repair ignores records, which a
    conversion that was killed right after publishing may have left.
    """
    terms.check()
    if "torch" in sys.modules and multiprocessing.parent_process() is not None:
        # The threads of a dataset's own torch would compete with other workers.
        sys.modules["torch"].set_num_threads(1)
    line = TaskLine(terms.run_file, number, 0 if alone else _LOOK_SECONDS)
    if alone:
        line.report(0, 0)  # over the counts of an earlier try
    record = load_record(task) if task.wanted is None else None
    return record or do_task(task, line.report, threads)


class TaskLine:
    """Writes the counts of task `number` to its row of the run file, as long as the file exists. Not thread safe."""

    def __init__(self, path: Path, number: int, look_seconds: float) -> None:
        self._path = path
        self._offset = number * _COUNTS.itemsize
        self._counts = np.zeros(2, _COUNTS.base)
        self._look_seconds, self._next_look = look_seconds, 0.0

    def report(self, done: int, refused: int, /) -> None:
        """Adds sources to the counts, and writes them every `look_seconds`. Raises Stop if the run file is gone."""
        self._counts += np.array((done, refused), _COUNTS.base)
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + self._look_seconds
        # It is opened at every look, since that is when a network filesystem asks whether the file is still there.
        try:
            with open_untrusted(self._path, os.O_WRONLY, sole_name=True) as file:
                os.pwrite(file.fileno(), self._counts.tobytes(), self._offset)
        except OSError as error:
            # Anything else, such as a full disk, is for the shard itself to meet.
            if error.errno in (errno.ENOENT, errno.ESTALE):
                raise Stop from None
