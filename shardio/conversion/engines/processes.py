"""Shard tasks on this machine's cores: in this process while it can keep them busy, beyond that in worker processes.

Worker processes are spawned, not forked, so that no lock or thread of the caller's is inherited. They end by
themselves when the process that started them is gone, however it went: each watches a pipe whose other end only that
process holds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing.connection import wait

import torch

from shardio.conversion.engines.pipes import lifeline, receive_progress, send_progress, tie
from shardio.conversion.engines.torchthreads import one_torch_thread
from shardio.conversion.plan import ShardTask
from shardio.conversion.task import Control, Report, ShardRecord, Stopped, do_task
from shardio.errors import ConvertError
from shardio.system.opening import open_pipe
from shardio.system.threads import run_apart

# Decoding, resizing and hashing run without the GIL, so that one process keeps a few cores busy. What is left, a tenth
# of the time that an image takes, would have more threads wait for each other.
THREADS_PER_PROCESS = 4


def run_tasks(tasks: Sequence[ShardTask], workers: int, report: Report, *, serial: bool = False) -> list[ShardRecord]:
    """Do all tasks; their records in the order of the tasks. `report` is called in the calling thread.

    With `serial`, every process has one thread, and a single worker is the calling thread. If `report` raises, or on
    Ctrl-C, the work stops: finished tasks stay, and those under way save what they have done.
    """
    processes = min(-(-workers // (1 if serial else THREADS_PER_PROCESS)), len(tasks))
    # Rather an idle core than one more than was asked for.
    threads = 1 if serial else max(1, workers // max(processes, 1))
    if processes <= 1:
        with one_torch_thread():
            control = Control(report, lambda: False, threads)
            return [do_task(task, control) for task in tasks]
    return _run_in_processes(tasks, processes, threads, report)


def _run_in_processes(tasks: Sequence[ShardTask], processes: int, threads: int, report: Report) -> list[ShardRecord]:
    stop_reader, stop_writer = open_pipe()

    def work(tell: Report) -> list[ShardRecord]:
        with contextlib.ExitStack() as ends:
            progress_reader, progress_writer, alive_reader, alive_writer = (
                ends.enter_context(end) for _ in range(2) for end in multiprocessing.Pipe(duplex=False)
            )
            pool = ProcessPoolExecutor(
                processes,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=tie,
                initargs=(progress_writer, alive_reader, threads),
            )
            # Ctrl-C is for the parent to handle. The workers inherit this from this thread, which has no other use.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

            def wake(future: Future[ShardRecord]) -> None:
                if not future.cancelled():  # or nobody reads any more, and the pipe may be full
                    send_progress(progress_writer, 0, 0, 0)

            try:
                futures = [pool.submit(_work, task) for task in tasks]
                for future in futures:
                    future.add_done_callback(wake)
                while not all(future.done() for future in futures):
                    if stop_reader.fileno() in wait([progress_reader, stop_reader.fileno()]):
                        raise Stopped
                    tell(*receive_progress(progress_reader))
                    for future in futures:
                        if future.done():
                            future.result()  # a failure ends the rest at once
                send_progress(progress_writer, 0, 0, 0)  # so that the last read does not wait
                tell(*receive_progress(progress_reader))
                return [future.result() for future in futures]
            except BrokenProcessPool:
                raise ConvertError(
                    "a worker process died, perhaps killed for want of memory (see `dmesg`). Run the same command "
                    "again, which goes on with what is kept, with fewer workers if memory is short. (A script that "
                    'calls shardio.convert must do so under `if __name__ == "__main__":`)'
                ) from None
            finally:
                alive_writer.close()
                pool.shutdown(wait=True, cancel_futures=True)

    with stop_reader, stop_writer:
        return run_apart(work, report, partial(os.write, stop_writer.fileno(), b"."), "shardio-workers")


def _work(task: ShardTask) -> ShardRecord:
    """In a worker process."""
    torch.set_num_threads(1)
    line = lifeline()
    return do_task(task, Control(line.report, line.stopped, line.threads))
