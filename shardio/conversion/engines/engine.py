"""Which engine does the tasks of a conversion: this machine's cores, an executor of the caller's, or a Dask cluster."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from shardio.conversion.amounts import check_workers
from shardio.conversion.engines.dask_cluster import check_scheduler, run_on_dask
from shardio.conversion.engines.pool import Pool, run_on_pool
from shardio.conversion.engines.processes import run_tasks
from shardio.conversion.plan import ShardTask
from shardio.conversion.records import ShardRecord
from shardio.conversion.task import Report
from shardio.system.machine import usable_cores


@dataclass(frozen=True)
class Engine:
    """Where the tasks are done. Raises ValueError for arguments that contradict each other."""

    workers: int | None = None
    """How many cores to use, by default all. Beside an executor or a scheduler, how many each shard is made with, by
    default one."""
    executor: Executor | None = None
    """Any concurrent.futures.Executor, on machines that have the same libraries, and SRC and OUT under the same names.
    It is not shut down."""
    scheduler: str | None = None
    """The address of a Dask scheduler, for the same on its cluster."""
    serial: bool = False
    """Whether every worker has one thread, and a single one is the calling thread: for datasets of Python."""

    def __post_init__(self) -> None:
        check_workers(self.workers)
        if self.executor is not None and self.scheduler is not None:
            raise ValueError("expected an executor or a scheduler, found both")
        if self.serial and self._is_elsewhere and (self.workers or 1) > 1:
            raise ValueError(
                f"a shard of a dataset is made by one thread: workers must be 1 or left out; found {self.workers}"
            )

    @property
    def _is_elsewhere(self) -> bool:
        return self.executor is not None or self.scheduler is not None

    @property
    def sends(self) -> bool:
        """Whether a dataset has to be sent to other processes."""
        return self._is_elsewhere or (self.workers or 1) > 1

    def check(self) -> None:
        """Raises ConvertError or ValueError if there is no such scheduler."""
        if self.scheduler is not None:
            check_scheduler(self.scheduler)

    def run(self, tasks: Sequence[ShardTask], report: Report) -> list[ShardRecord]:
        """Does all tasks, and returns their records in their order. An exception of `report` stops the work."""
        if self.executor is not None:
            return run_on_pool(tasks, Pool(self.executor), report, threads=self.workers or 1)
        if self.scheduler is not None:
            return run_on_dask(tasks, self.scheduler, report, threads=self.workers or 1)
        return run_tasks(tasks, self.workers or (1 if self.serial else usable_cores()), report, serial=self.serial)
