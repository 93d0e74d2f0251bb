"""Chooses where the tasks of a conversion run: this process, worker processes, or a Dask cluster."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardio.conversion.engines.pool import RESUME, Pool, Terms, run_on_pool
from shardio.conversion.options import ConvertOptions, count_workers
from shardio.conversion.plan import ShardTask
from shardio.conversion.records import ShardRecord
from shardio.conversion.task import Report, do_task
from shardio.errors import ConvertError

if TYPE_CHECKING:
    from distributed import Client

# Decoding, resizing and hashing run without the GIL, so that one process keeps a few cores busy. The rest, a tenth of
# the time that an image takes, would have more threads wait for each other.
THREADS_PER_PROCESS = 4
# The scheduler keeps what waits in its memory, a megabyte or more for each task: enough that no worker waits, and that
# a cluster which grows with its work grows.
_TASKS_PER_THREAD = 2
_FEWEST_TASKS = 64
# For errors of one machine, say of its mount of the filesystem. Lost workers do not count.
_RETRIES = 2
_NAMED_WORKERS = 3


@dataclass(frozen=True)
class Engine:
    """Runs tasks in this process, in worker processes, or on a Dask cluster.

    Raises ValueError for arguments that contradict each other.
    """

    options: ConvertOptions
    """`workers` are the cores to use, by default all; with a `scheduler`, the cores for each shard, by default one."""
    serial: bool = False
    """Whether each worker has one thread, and a single worker runs in the calling thread: for Python datasets."""

    def __post_init__(self) -> None:
        workers = self.options.workers or 1
        if self.serial and self.options.scheduler is not None and workers > 1:
            raise ValueError(
                f"on a cluster, one thread makes each shard of a dataset: workers must be 1 or None; found {workers}"
            )

    @property
    def sends(self) -> bool:
        """Whether the tasks of a Python dataset run in other processes, so the dataset has to be sent there."""
        return self.options.scheduler is not None or (self.options.workers or 1) > 1

    def check(self) -> None:
        """Raises ValueError if the scheduler's address is invalid, and ConvertError if no scheduler answers."""
        if self.options.scheduler is not None:
            with open_cluster(self.options.scheduler):
                pass

    def run(self, tasks: Sequence[ShardTask], report: Report, run_file: Path) -> list[ShardRecord]:
        """Runs all tasks, and returns their records in the order of the tasks.

        `report` is called in the calling thread. The work stops if `report` raises, if a task fails, or on Ctrl-C.
        `run_file` is the path of a file to create, for the progress of tasks in other processes: see `run_on_pool`.
        """
        if not tasks:
            return []
        if self.options.scheduler is not None:
            with open_cluster(self.options.scheduler) as cluster:
                return run_on_pool(tasks, cluster, report, run_file, self.options.workers or 1)
        threads, processes = self._split_workers(len(tasks))
        if processes > 1:
            with _OwnProcesses(processes) as executor:
                return run_on_pool(tasks, Pool(executor), report, run_file, threads)
        return [do_task(task, report, threads) for task in tasks]

    def _split_workers(self, num_tasks: int) -> tuple[int, int]:
        """Returns (threads per process, number of processes) to use on this machine for `num_tasks` tasks."""
        workers = 1 if self.serial and self.options.workers is None else count_workers(self.options.workers)
        processes = min(-(-workers // (1 if self.serial else THREADS_PER_PROCESS)), num_tasks)
        # Rather an idle core than one more than was asked for.
        return 1 if self.serial else max(1, workers // processes), processes


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
        return self._client.submit(call, *arguments, pure=False, retries=_RETRIES)  # type: ignore[return-value]

    def cancel(self, futures: Iterable[Future[ShardRecord]]) -> None:
        self._client.cancel(list(futures))
