"""A run's log, and a trace of some of its steps."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from recipe import Run

from shardio import ShardLoader


class Log:
    """The log of rank 0: a line for people, the same in OUT/log.jsonl for programs, and in TensorBoard's files."""

    def __init__(self, run: Run, loader: ShardLoader, images_seen: int) -> None:
        self._num_samples = len(loader.shards)
        self._path = run.out / "log.jsonl" if loader.world.rank == 0 else None
        self._board: Any = None
        if self._path and run.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard

            # Values that were written after the checkpoint come again.
            self._board = SummaryWriter(str(run.out / "tensorboard"), purge_step=images_seen)

    def write(self, images_seen: int, **values: float) -> None:
        if self._path is None:
            return
        line = {"epoch": images_seen / self._num_samples, "images_seen": images_seen, **values}
        print("  ".join(f"{name} {value:.6g}" for name, value in line.items()), flush=True)
        with self._path.open("a", encoding="ascii") as file:
            file.write(json.dumps(line) + "\n")
        if self._board:
            for name, value in values.items():
                self._board.add_scalar(name, value, images_seen)
            self._board.flush()


def profiler(run: Run, rank: int) -> AbstractContextManager[torch.profiler.profile | None]:
    if not run.profile or rank != 0:
        return nullcontext()
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=2, warmup=2, active=run.profile, repeat=1),
        on_trace_ready=lambda profile: profile.export_chrome_trace(str(run.out / "trace.json")),
    )
