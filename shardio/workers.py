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
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection

import torch

from shardio.errors import ConvertError
from shardio.plan import ShardTask
from shardio.shardtask import Control, ShardRecord, do_task

# (sources done, of these refused): far below PIPE_BUF, so that writes of many processes to one pipe never mix.
_PROGRESS = struct.Struct("<II")
# A worker told to stop looks up after each picture; one that is deep in an fsync is ended after this time.
_GRACE_SECONDS = 0.7
# Decoding and resizing run without the GIL, so that one process keeps a few cores busy. Beyond that its one writing
# thread, which copies and checksums, would become the limit.
_THREADS_PER_PROCESS = 4

Report = Callable[[int, int], None]


def run_tasks(tasks: Sequence[ShardTask], workers: int, report: Report) -> list[ShardRecord]:
    """Do all tasks; their records in the order of the tasks. `report` is called in the calling thread.

    If `report` raises, or on Ctrl-C, the work stops: tasks under way leave nothing behind and finished ones stay.
    """
    processes = min(-(-workers // _THREADS_PER_PROCESS), len(tasks))
    threads = -(-workers // max(processes, 1))
    if processes <= 1:
        with _one_torch_thread():
            control = Control(report, lambda: False, threads)
            return [do_task(task, control) for task in tasks]
    return _run_in_processes(tasks, processes, threads, report)


@contextlib.contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Pictures are too small to split over torch's own threads, which would only be in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run_in_processes(tasks: Sequence[ShardTask], processes: int, threads: int, report: Report) -> list[ShardRecord]:
    progress_reader, progress_writer = multiprocessing.Pipe(duplex=False)
    alive_reader, alive_writer = multiprocessing.Pipe(duplex=False)
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(progress_writer, alive_reader, threads),
    )
    futures: list[Future[ShardRecord]] = []
    try:
        with _interrupts_ignored():  # by the workers, which inherit this: Ctrl-C is for the parent to handle
            futures = [pool.submit(_work, task) for task in tasks]
        for future in futures:
            # Wakes the read below; all zeros, so that it counts nothing.
            future.add_done_callback(lambda _: _send(progress_writer, 0, 0))
        while not all(future.done() for future in futures):
            _receive(progress_reader, report)
            for future in futures:
                if future.done():
                    future.result()  # a failure ends the rest at once
        _send(progress_writer, 0, 0)  # so that the last read does not wait
        _receive(progress_reader, report)
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise ConvertError(
            "a worker process died, perhaps killed for want of memory (see `dmesg`). Finished shards are kept: run "
            "the same command again, with fewer workers if memory is short. (A script that calls shardio.convert "
            'must do so under `if __name__ == "__main__":`)'
        ) from None
    finally:
        alive_writer.close()
        pool.shutdown(wait=True, cancel_futures=True)
        for pipe in (progress_reader, progress_writer, alive_reader):
            pipe.close()


def _receive(pipe: Connection, report: Report) -> None:
    data = os.read(pipe.fileno(), 8192 * _PROGRESS.size)
    done = refused = 0
    for message in _PROGRESS.iter_unpack(data):
        done += message[0]
        refused += message[1]
    if done:
        report(done, refused)


def _send(pipe: Connection, done: int, refused: int) -> None:
    os.write(pipe.fileno(), _PROGRESS.pack(done, refused))


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may change handlers, and only it is interrupted
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# --- inside a worker process -----------------------------------------------------------------------------------------

_control: Control | None = None


def _start_worker(progress: Connection, alive: Connection, threads: int) -> None:
    global _control
    torch.set_num_threads(1)
    stop = threading.Event()

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            alive.recv_bytes()  # nothing is ever sent: this returns when the parent closes its end or is gone
        stop.set()
        threading.Event().wait(_GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="shardio-watch", daemon=True).start()

    def report(done: int, refused: int) -> None:
        try:
            _send(progress, done, refused)
        except OSError:  # nobody reads any more
            stop.set()

    _control = Control(report, stop.is_set, threads)


def _work(task: ShardTask) -> ShardRecord:
    assert _control is not None
    return do_task(task, _control)
