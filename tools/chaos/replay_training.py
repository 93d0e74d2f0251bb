#!/usr/bin/env python
"""Kills trainings, goes on with other ranks, and checks that `shardio replay` gives back any batch that they had.

    python tools/chaos/replay_training.py [--rounds 200] [--seed 0]

Each round is the history of one training: one to three runs, each of which goes on from the state that the run before
it has kept, on another number of ranks and with another batch size. A run is a process that holds the loaders of all
its ranks. It writes down what each rank receives, its keys and the sha256 of its pixels and labels, until it is killed.
Then random steps of random ranks are asked of `shardio replay`, by the epoch and the place in it, or by the kept state.
Exit code 1 if a key or a pixel differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import attack
import numpy as np
import torch
from attack import Say, make_parser, verdict
from click.testing import CliRunner

from shardio import ShardLoader, ShardWriter
from shardio.augment import Transform, from_dict, recipe
from shardio.augment.recipes import RECIPES
from shardio.cli.main import cli

NUM_SAMPLES = 61
NUM_CLASSES = 5
SHAPE = (24, 20, 3)

PATIENCE_SECONDS = 120


@dataclass(frozen=True)
class Run:
    """The orders to one process of a training."""

    data: str
    log: str
    state: str
    """A file with the loader's state that the run begins with and leaves; there is none before the first run."""
    chain: str
    options: dict[str, Any]
    """Those of the loader that all runs of a training have in common."""
    world_size: int
    batch_size: int
    epoch: int
    """The epoch that the first run begins with."""
    steps: int
    """So many batches are received, unless the epoch has fewer."""
    kept: int
    """The state is kept after so many batches."""


@dataclass(frozen=True)
class LogLine:
    """What a rank had in its hands: a line of the log."""

    rank: int
    step: int
    """Batches before it in the epoch, since the run began."""
    state: dict[str, Any]
    """The loader's state before the batch."""
    keys: list[str]
    sha256: str


def train(run: Run) -> None:
    """Receives what each rank is to receive, and writes it down before the next batch."""
    transform = from_dict(json.loads(Path(run.chain).read_text()))
    assert isinstance(transform, Transform)
    path = Path(run.state)
    state = json.loads(path.read_text()) if path.exists() else None
    with open(run.log, "a", buffering=1) as log:
        for rank in range(run.world_size):
            options: dict[str, Any] = {**run.options, "rank": rank, "world_size": run.world_size}
            with ShardLoader(
                run.data,
                run.batch_size,
                device="cpu",
                num_threads=1,
                transform=transform,
                return_indices=True,
                **options,
            ) as loader:
                loader.set_epoch(run.epoch)
                if state is not None:
                    loader.load_state_dict(state)
                before = {**loader.state_dict(), "epoch": run.epoch} if state is None else loader.state_dict()
                for step, (images, labels, indices, *_) in zip(range(run.steps), loader, strict=False):
                    keys = loader.shards.column_of("key", indices.numpy())
                    named = [key.decode() for key in keys.tolist()]
                    line = LogLine(rank, step, before, named, sha256_of(images, labels))
                    log.write(json.dumps(asdict(line)) + "\n")
                    before = loader.state_dict()
                    if rank + 1 == run.world_size and step + 1 == run.kept:
                        path.with_suffix(".new").write_text(json.dumps(before))
                        path.with_suffix(".new").replace(path)


def sha256_of(images: Any, labels: Any) -> str:
    """Returns the checksum of the pixels, or of all views, and of the labels of a batch."""
    digest = hashlib.sha256()
    for tensor in (*(images if isinstance(images, tuple) else (images,)), labels):
        array = tensor.numpy() if isinstance(tensor, torch.Tensor) else tensor
        digest.update(str((array.dtype, array.shape)).encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def train_and_kill(run: Run) -> None:
    """Trains in a process of its own, and kills it at a random moment after its state was kept."""
    state = Path(run.state)
    before = state.read_bytes() if state.exists() else b""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(asdict(run))]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environ)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None and (state.read_bytes() if state.exists() else b"") == before:
        if time.monotonic() > deadline:
            process.kill()
            raise TimeoutError(f"no state within {PATIENCE_SECONDS} seconds")
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    if process.wait() not in (0, -signal.SIGKILL):
        raise RuntimeError(f"failed by itself, code {process.returncode}: {run}")


@dataclass
class Counts(attack.Counts):
    runs: int = 0
    batches: int = 0
    """Batches that the trainings wrote down."""
    replayed: int = 0
    resumed: int = 0
    """Batches replayed of a run that went on in the middle of an epoch."""


class Histories(attack.Rounds[Counts]):
    """Trainings in `folder`, each run of which is done by `trained`."""

    def __init__(
        self, folder: Path, seed: int, say: Say = print, trained: Callable[[Run], None] = train_and_kill
    ) -> None:
        super().__init__(folder, seed, say, Counts())
        self._trained = trained
        self._data = folder / "set"
        pixels = np.random.default_rng(seed).integers(0, 256, (NUM_SAMPLES, *SHAPE), dtype=np.uint8)
        classes = [f"class{label}" for label in range(NUM_CLASSES)]
        with ShardWriter(self._data, SHAPE, classes=classes, shard_nbytes=4096 + 20 * pixels[0].nbytes) as writer:
            for number, image in enumerate(pixels):
                writer.append(image, number % NUM_CLASSES, key=f"class{number % NUM_CLASSES}/{number}.jpg")

    def round(self, replays: int = 1) -> None:
        """Trains once, and asks for `replays` batches of each run."""
        draw = self._random
        folder = self.folder / f"round-{self.counts.rounds}"
        folder.mkdir()
        chain = folder / "chain.json"
        name = draw.choice(sorted(RECIPES))
        side = 112 if name == "ijepa" else 16  # whose patches of 14 pixels must be more than a few
        chain.write_text(json.dumps(recipe(name, side, NUM_CLASSES).to_dict()))
        options: dict[str, Any] = {
            "seed": draw.randrange(1 << 40),
            "shuffle": draw.choice([True, False, "block"]),
            "tail": draw.choice(["drop", "pad", "short"]),
        }
        epoch = draw.randrange(5)
        for number in range(draw.randint(1, 3)):
            kept = draw.randint(1, 4)
            run = Run(
                data=str(self._data),
                log=str(folder / f"run-{number}.jsonl"),
                state=str(folder / "state.json"),
                chain=str(chain),
                options=options,
                world_size=draw.randint(1, 3),
                batch_size=draw.choice([2, 4, 6]),  # even, as some recipes mix the samples of a batch in pairs
                epoch=epoch,
                steps=kept + 3,
                kept=kept,
            )
            self._trained(run)
            log = Path(run.log).read_text().split("\n")[:-1] if Path(run.log).exists() else []
            self.counts.runs += 1
            self.counts.batches += len(log)
            for line in draw.sample(log, min(replays, len(log))):
                self._replay(run, LogLine(**json.loads(line)), resumed=number > 0)
        self.counts.rounds += 1

    def _replay(self, run: Run, had: LogLine, resumed: bool) -> None:
        folder = Path(run.log).parent
        words = [
            *("replay", run.data, "--batch-size", run.batch_size, "--rank", had.rank),
            *("--world-size", run.world_size, "--seed", run.options["seed"], "--tail", run.options["tail"]),
            *("--transform", run.chain, "--save", folder / "batch.npz", "--json"),
        ]
        if self._random.random() < 0.5:
            torch.save({"epoch": 1, "nested": [{"loader": had.state}]}, folder / "checkpoint.pt")
            words += ["--state", folder / "checkpoint.pt"]
        else:
            words += ["--shuffle", str(run.options["shuffle"]).lower(), "--epoch", had.state["epoch"]]
            words += ["--consumed", had.state["consumed"]] if resumed else ["--step", had.step]
        result = CliRunner().invoke(cli, list(map(str, words)))
        if result.exit_code or result.exception:
            self._violation(f"{words}: {result.output} {result.exception!r}")
            return
        with np.load(folder / "batch.npz") as batch:
            images = [batch[name] for name in batch.files if name.startswith("images")]
            found = sha256_of(tuple(images), batch["labels"])
        if json.loads(result.stdout)["keys"] != had.keys:
            self._violation(f"{words}: expected {had.keys}, found {result.stdout}")
        elif found != had.sha256:
            self._violation(f"{words}: other pixels or labels")
        self.counts.replayed += 1
        self.counts.resumed += resumed


def replay_histories(rounds: int, seed: int, folder: Path | None = None, say: Say = print) -> Counts:
    """Does so many rounds in `folder`, by default a temporary one."""
    with tempfile.TemporaryDirectory(prefix="replay-training-", dir=folder) as made:
        histories = Histories(Path(made), seed, say)
        for _ in range(rounds):
            histories.round()
    return histories.counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "the trainings")
    parser.add_argument("--rounds", type=int, default=200, help="trainings; default %(default)s")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.worker:
        train(Run(**json.loads(chosen.worker)))
        return 0
    print(f"seed {chosen.seed}", flush=True)
    return verdict(replay_histories(chosen.rounds, chosen.seed, chosen.folder))


if __name__ == "__main__":
    sys.exit(main())
