"""Kills a training, resumes it on other ranks, and compares all batches, for `shardio demo --elastic`.

Each start of the training has new processes, one per rank. A server that has imported torch once forks them. They end
when this process ends, even if it is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Generator
from contextlib import closing
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import numpy as np
from click import echo

from shardio.conversion.engines.engine import end_with_parent
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.errors import ShardioError

_GLOBAL_BATCH = 60  # a multiple of each number of ranks
_RANKS = (4, 3, 5)
_CLASSES = 10
_SAMPLES = 630  # half a global batch is left over at the end of an epoch


class _Run(NamedTuple):
    """One start of a training, up to step `last`, from the state that is in `folder`. States are saved there."""

    out: Path
    folder: Path
    world_size: int
    last: int
    save_every: int

    @property
    def batch_size(self) -> int:
        return _GLOBAL_BATCH // self.world_size


def draw_set(out: Path, size: tuple[int, int]) -> None:
    """Writes a set of noise in ten colours, one for each class."""
    rng = np.random.default_rng(0)
    colours = rng.integers(0, 192, (_CLASSES, 3), np.uint8)
    echo(f"drawing {_SAMPLES} pictures of {size[0]}x{size[1]} in {_CLASSES} classes")
    with ShardWriter(out, (*size, 3), classes=[f"colour-{number}" for number in range(_CLASSES)]) as writer:
        for number in range(_SAMPLES):
            noise = rng.integers(0, 64, (*size, 3), np.uint8)
            writer.append(colours[number % _CLASSES] + noise, number % _CLASSES)


def run_elastic(out: Path, steps: int) -> None:
    """Trains on 4, 3 and 5 ranks, killed in between, and compares all batches with one uninterrupted process.

    Raises ShardioError at the first global batch that differs.
    """
    save_every = max(1, steps // 9)
    # Up to two steps after a state was saved: these steps come again.
    ends = [min(steps, steps * part // len(_RANKS) + 2) for part in range(1, len(_RANKS) + 1)]
    echo(f"\ntraining for {steps} steps of {_GLOBAL_BATCH} samples; the state is saved every {save_every} steps")
    compared: list[int] = []
    with tempfile.TemporaryDirectory(prefix="shardio-demo-") as folder:
        expected = dict(_global_batches(_Run(out, Path(folder, "whole"), 1, steps, save_every)))
        echo(f"  1 process, uninterrupted: steps 1 to {steps}")
        for world_size, last in zip(_RANKS, ends, strict=True):
            run = _Run(out, Path(folder, "pieces"), world_size, last, save_every)
            first = len(compared)
            with closing(_global_batches(run)) as batches:
                for step, samples in batches:
                    if samples != expected[step]:
                        raise ShardioError(
                            f"step {step} on {world_size} ranks: expected the samples of the uninterrupted run, in the "
                            "same order and bit for bit, found other pixels or labels"
                        )
                    compared.append(step)
            end = "" if world_size == _RANKS[-1] else ", then killed"
            echo(f"  {world_size} ranks of {run.batch_size} samples: steps {compared[first]} to {last}{end}")
    distinct = len(set(compared))
    if distinct < steps:
        raise ShardioError(f"expected {steps} steps, found {distinct}: a resumed training skipped steps")
    echo(
        f"all {len(compared)} global batches are bit-equal to the uninterrupted run's: pixels, labels, order\n"
        f"  {distinct} steps, and {len(compared) - distinct} repeated: they came after the last saved state"
    )


def _global_batches(run: _Run) -> Generator[tuple[int, list[bytes]], None, None]:
    """Yields each step and the hashes of the samples in its global batch. Kills the ranks after the last step."""
    run.folder.mkdir(exist_ok=True)
    _run_server()
    ranks: list[tuple[BaseProcess, Connection]] = []
    try:
        for rank in range(run.world_size):
            ranks.append(_start(run, rank))
        step = 0
        while step < run.last:
            parts = [pipe.recv() for _, pipe in ranks]
            step = parts[0][0]
            yield step, [sample for _, samples in parts for sample in samples]
    except EOFError:
        raise ShardioError(f"one of {run.world_size} ranks ended early") from None
    finally:
        for process, _ in ranks:
            process.kill()
        for process, pipe in ranks:
            process.join()
            process.close()
            pipe.close()


def _run_server() -> None:
    """Starts the server that forks the ranks, unless it is running. It imports torch without starting threads."""
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    multiprocessing.set_forkserver_preload(["shardio.cli.demo_run"])
    resource_tracker.ensure_running()  # the server starts it otherwise, which unblocks the signal
    # Ctrl-C is for this process alone: the server and the ranks inherit the blocked signal.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(run: _Run, rank: int) -> tuple[BaseProcess, Connection]:
    """Starts a rank. Returns its process and the pipe that receives its part of each batch."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(run, rank, sender), daemon=True)
    process.start()
    sender.close()  # so only the rank has it, and receiving fails once the rank has ended
    return process, receiver


def _train(run: _Run, rank: int, pipe: Connection) -> None:
    end_with_parent()
    from shardio.cli.demo_run import train_rank

    train_rank(run.out, run.folder, rank, run.world_size, run.batch_size, run.last, run.save_every, pipe)
