#!/usr/bin/env python
"""Kills distributed training in the middle of epochs, goes on with other ranks, and checks the order of the samples.

    python tools/chaos/kill_train.py [--rounds 10] [--seed 0] [--shuffle global]

Each round trains some epochs under torchrun, with gloo and DistributedDataParallel on the CPU. Every rank logs what it
receives, and rank 0 writes a checkpoint every few steps. All processes are killed with SIGKILL at a random moment, and
the training goes on from the last checkpoint with another number of ranks and another batch size. What was received
after that checkpoint was lost with the crash; all the rest, the parts of a step joined in the order of the ranks, must
be the sequence of one process that was never disturbed. Exit code 1 if it was otherwise. Linux only: it looks into
/proc.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import attack
import numpy as np
import torch
import torch.distributed as dist
from attack import Say, make_parser, verdict, write_set
from numpy.typing import NDArray
from torch.nn.parallel import DistributedDataParallel

from shardio import BlockShuffle, ShardLoader

# The orders that --shuffle knows, as options of the loader.
SHUFFLES: dict[str, dict[str, Any]] = {
    "global": {"shuffle": True},
    "block": {"shuffle": BlockShuffle(8, 16)},
    "stored": {"shuffle": False},
}

# One more than a multiple of 15: of FIRST_PLAN's three ranks, two end a whole epoch with an empty batch.
NUM_SAMPLES = 541
SHAPE = (4, 5, 3)
NUM_CLASSES = 7
EPOCHS = 2

FIRST_PLAN = ((2, 4), (3, 5))
"""Ranks and batch size of each run of the first round; those of later rounds are random. The second run seldom begins
at a multiple of its own global batch."""

# A run takes some seconds, on a loaded machine more. One that takes so long hangs.
PATIENCE_SECONDS = 120
POLL_SECONDS = 0.005
# The kill comes within so many seconds after the step it waits for: some steps later, at any place of one.
MOST_DELAY_SECONDS = 0.02

# Names the folder of a run in the environment of all its processes. torchrun puts every worker into a session of its
# own, and orphans have no parent to be known by.
MARK = "KILL_TRAIN_FOLDER"


# --- samples that can be known by their pixels -----------------------------------------------------------------------


def pixels_of(index: int) -> NDArray[np.uint8]:
    pixels = np.random.default_rng(index).integers(0, 256, SHAPE, dtype=np.uint8)
    pixels.reshape(-1)[:8] = np.frombuffer(index.to_bytes(8, "little"), np.uint8)
    return pixels


def index_of(pixels: NDArray[np.uint8]) -> int:
    """Returns the sample that has these pixels, or -1 if there is none."""
    index = int.from_bytes(pixels.tobytes()[:8], "little")
    return index if np.array_equal(pixels, pixels_of(index)) else -1


def open_loader(data: str, batch_size: int, shuffle: str, seed: int, **world: Any) -> ShardLoader:
    return ShardLoader(
        data,
        batch_size,
        seed=seed,
        tail="short",
        device="cpu",
        num_threads=2,
        return_indices=True,
        **SHUFFLES[shuffle],
        **world,
    )


# --- one rank of the training ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The orders to the ranks of one run."""

    data: str
    folder: str
    """The folder of the logs."""
    checkpoint: str
    shuffle: str
    seed: int
    steps_per_checkpoint: int
    world_size: int = 1
    batch_size: int = 1
    hold: int | None = None
    """The step after which ranks wait for the kill, so that a slow parent finds them in the middle of the epoch."""


class Step(NamedTuple):
    """A line of a rank's log: what it received. Steps are numbered from 1 and counted over all runs."""

    step: int
    state: dict[str, Any]
    indices: list[int]
    pixels: list[int]
    """The samples that have these pixels."""
    labels: list[int]


class Checkpoint(NamedTuple):
    steps: int
    loader: str
    """The loader's state as JSON; empty before the first checkpoint."""
    model: dict[str, Any]
    optimizer: dict[str, Any]

    def save(self, path: Path) -> None:
        temporary = path.with_suffix(".tmp")
        torch.save(self._asdict(), temporary)
        temporary.replace(path)

    @staticmethod
    def load(path: Path) -> Checkpoint:
        return Checkpoint(**torch.load(path, weights_only=True)) if path.exists() else Checkpoint(0, "", {}, {})


def train(run: Run) -> NoReturn:
    """Trains as one rank, under torchrun."""
    signal.alarm(2 * PATIENCE_SECONDS)  # so that a rank ends even if its parent is gone
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(int(np.prod(SHAPE)), NUM_CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    checkpoint = Checkpoint.load(Path(run.checkpoint))
    step = checkpoint.steps
    with open_loader(run.data, run.batch_size, run.shuffle, run.seed) as loader:
        rank = loader.world.rank
        if step:
            model.load_state_dict(checkpoint.model)
            optimizer.load_state_dict(checkpoint.optimizer)
            loader.load_state_dict(json.loads(checkpoint.loader))
        parallel = DistributedDataParallel(model)
        # The log is not buffered: lines that are written before a kill stay written.
        with open(_log_path(run, rank), "wb", buffering=0) as log:
            for epoch in range(loader.state_dict()["epoch"], EPOCHS):
                loader.set_epoch(epoch)
                for images, labels, indices in loader:
                    step += 1
                    state = loader.state_dict()
                    pixels = [index_of(image) for image in images.permute(0, 2, 3, 1).numpy()]
                    # The line comes before learning, which no rank ends until all have begun: at a checkpoint of this
                    # step all ranks have logged it.
                    line = Step(step, state, indices.tolist(), pixels, labels.tolist())
                    log.write(json.dumps(line).encode() + b"\n")
                    learn(parallel, optimizer, images, labels)
                    if rank == 0 and step % run.steps_per_checkpoint == 0:
                        kept = Checkpoint(step, json.dumps(state), model.state_dict(), optimizer.state_dict())
                        kept.save(Path(run.checkpoint))
                    if step == run.hold:
                        signal.pause()
    dist.destroy_process_group()
    # One of gloo's threads may still let go of a Python object when the interpreter is at its end, and torch aborts.
    os._exit(0)


def learn(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor
) -> None:
    """Does one step.

    DistributedDataParallel takes the mean of the ranks' gradients, whatever the sizes of their batches. The sum over a
    rank's samples, times ranks / samples of all ranks, makes that the mean over all samples. An empty batch has the
    sum 0 and gradients of 0, and takes part as any other: a rank that left the step out would keep the others waiting.
    """
    samples = torch.tensor(len(labels))
    dist.all_reduce(samples)
    losses = torch.nn.functional.cross_entropy(model(images.flatten(1).float() / 255), labels, reduction="sum")
    optimizer.zero_grad()
    torch.autograd.backward(losses * dist.get_world_size() / samples)
    optimizer.step()


def _log_path(run: Run, rank: int) -> Path:
    return Path(run.folder) / f"rank-{rank}.jsonl"


# --- processes -------------------------------------------------------------------------------------------------------


def marked_processes(folder: Path) -> list[int]:
    """Returns the processes of all runs in `folder` or below that have not ended. A zombie has no environment."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for entry in os.listdir("/proc"):
        with suppress(OSError):
            if entry.isdigit() and mark in Path("/proc", entry, "environ").read_bytes():
                found.append(int(entry))
    return found


class Torchrun:
    """A run under way. No process of it is left when the `with` block ends."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.folder = Path(run.folder)
        self.folder.mkdir()
        environ = {
            **os.environ,
            MARK: run.folder,
            "TMPDIR": run.folder,  # a launcher that is killed leaves its temporary files
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # the same shardio as here
        }
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"]
        worker = [str(Path(__file__).resolve()), "--worker", json.dumps(asdict(run))]
        with open(self.folder / "output", "wb") as output:
            self.process = subprocess.Popen(
                [*launcher, "--nproc-per-node", str(run.world_size), *worker],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
                start_new_session=True,
            )

    def __enter__(self) -> Torchrun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def wait_for(self, step: int | None) -> bool:
        """Waits until rank 0 has logged `step`, with None for the end. Returns whether the step did come."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.process.poll() is None:
            if step is not None and (log := self.read_log(0)) and log[-1].step >= step:
                return True
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {step or 'end'} within {PATIENCE_SECONDS} seconds: {self.output()}")
            time.sleep(POLL_SECONDS)
        return False

    def kill(self) -> None:
        """Kills the launcher first, so that it starts no more, and then all that it has started."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        while left := marked_processes(self.folder):
            if time.monotonic() > deadline:
                raise TimeoutError(f"alive {PATIENCE_SECONDS} seconds after SIGKILL: {left}")
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        self.process.wait()

    def read_log(self, rank: int) -> list[Step]:
        path = _log_path(self.run, rank)
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [Step(*json.loads(line)) for line in lines]

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace").strip()


# --- what must be true -----------------------------------------------------------------------------------------------


class Stretch(NamedTuple):
    """The steps of a run that count: those after `start`, up to `stop`. Each rank's log may go on beyond."""

    batch_size: int
    start: int
    stop: int
    logs: list[list[Step]]


def undisturbed(data: str, shuffle: str, seed: int, batch_size: int) -> list[list[int]]:
    """Returns the order of each epoch, as one process reads it."""
    orders = []
    with open_loader(data, batch_size, shuffle, seed, rank=0, world_size=1) as loader:
        for epoch in range(EPOCHS):
            loader.set_epoch(epoch)
            orders.append([index for batch in loader for index in batch[2].tolist()])
    return orders


def faults_of(runs: Sequence[Stretch], expected: Sequence[Sequence[int]]) -> list[str]:
    """Returns how the runs, one after the other, differ from the epochs expected."""
    faults = []
    epochs: dict[int, list[int]] = defaultdict(list)
    for number, run in enumerate(runs):
        logs = [[step for step in log if step.step <= run.stop] for log in run.logs]
        for rank, log in enumerate(logs):
            if [step.step for step in log] != list(range(run.start + 1, run.stop + 1)):
                faults.append(f"run {number}: rank {rank} has not the steps {run.start + 1} to {run.stop}, each once")
        for parts in zip(*logs, strict=False):
            state = parts[0].state
            order = epochs[state["epoch"]]
            for part in parts:
                order += part.indices
            place = f"run {number}, epoch {state['epoch']}, step {parts[0].step}"
            step_faults = _faults_of_step(parts, run.batch_size, len(order), len(expected[0]))
            faults += [f"{place}: {fault}" for fault in step_faults]
    if sorted(epochs) != list(range(len(expected))):
        faults.append(f"expected the epochs 0 to {len(expected) - 1}, found {sorted(epochs)}")
    for epoch, whole in enumerate(expected):
        found = epochs[epoch]
        if found != whole:
            lost, again = sorted(set(whole) - set(found)), len(found) - len(set(found))
            faults.append(f"epoch {epoch}: not the order of one process; skipped {lost}, {again} came again")
    return faults


def _faults_of_step(parts: Sequence[Step], batch_size: int, consumed: int, num_samples: int) -> list[str]:
    faults = []
    state = parts[0].state
    if any(part.state != state for part in parts):
        faults.append(f"the ranks' states differ: {[part.state for part in parts]}")
    if state["consumed"] != consumed:
        faults.append(f"received {consumed} samples of the epoch, the state says {state['consumed']}")
    sizes = [len(part.indices) for part in parts]
    even = max(sizes) - min(sizes) <= 1 and max(sizes) <= batch_size
    if not even or (consumed < num_samples and min(sizes) < batch_size):
        faults.append(f"batches of {sizes}, the batch size is {batch_size}")
    for rank, part in enumerate(parts):
        if part.pixels != part.indices:
            faults.append(f"rank {rank} received pixels of {part.pixels} as {part.indices}")
        if part.labels != [index % NUM_CLASSES for index in part.indices]:
            faults.append(f"rank {rank} received labels {part.labels} for {part.indices}")
    return faults


# --- rounds ----------------------------------------------------------------------------------------------------------


@dataclass
class Counts(attack.Counts):
    runs: int = 0
    kills: int = 0
    """Kills in the middle of an epoch."""
    resumed: int = 0
    """Runs that went on from a checkpoint in the middle of an epoch."""
    steps: int = 0
    """Steps that counted."""
    lost: int = 0
    """Steps done after the last checkpoint."""
    empty: int = 0
    """Batches without a sample, among those that counted."""

    def __str__(self) -> str:
        return (
            f"rounds {self.rounds}, runs {self.runs}, killed in the middle of an epoch {self.kills}, resumed there "
            f"{self.resumed}; steps {self.steps}, lost with a kill {self.lost}, empty batches {self.empty}; "
            f"violations {len(self.violations)}"
        )


class Killer:
    """Rounds of killing. `folder` holds everything it makes."""

    def __init__(self, folder: Path, seed: int, shuffle: str, say: Say) -> None:
        self.folder = folder
        self.shuffle = shuffle
        self.say = say
        self.counts = Counts()
        self._random = random.Random(seed)
        self._data = folder / "set"
        images = np.stack([pixels_of(index) for index in range(NUM_SAMPLES)])
        write_set(self._data, images, NUM_CLASSES, samples_per_shard=NUM_SAMPLES // 3)

    def round(self) -> None:
        """Does one training, from its first step to its last."""
        folder = self.folder / f"round-{self.counts.rounds}"
        folder.mkdir()
        plan = self._plan()
        run = Run(
            data=str(self._data),
            folder="",
            checkpoint=str(folder / "checkpoint"),
            shuffle=self.shuffle,
            seed=self._random.randrange(1 << 32),
            steps_per_checkpoint=self._random.randint(2, 6),
        )
        name = f"round {self.counts.rounds}, {' -> '.join(f'{ranks} x {size}' for ranks, size in plan)}"
        kept = []
        for number, (world_size, batch_size) in enumerate(plan):
            run = replace(run, folder=str(folder / f"run-{number}"), world_size=world_size, batch_size=batch_size)
            kept.append(self._run(run, kill=number + 1 < len(plan)))
        expected = undisturbed(run.data, run.shuffle, run.seed, self._random.randint(1, 64))
        faults = faults_of(kept, expected)
        self.counts.rounds += 1
        self.counts.steps += kept[-1].stop
        self.counts.empty += sum(
            not step.indices for one in kept for log in one.logs for step in log if step.step <= one.stop
        )
        self.counts.violations += [f"{name}: {fault}" for fault in faults]
        self.say(f"{name}: {'as undisturbed' if not faults else 'VIOLATION ' + faults[0]}")

    def _plan(self) -> Sequence[tuple[int, int]]:
        if not self.counts.rounds:
            return FIRST_PLAN
        return [(self._random.randint(1, 4), self._random.randint(1, 9)) for _ in range(self._random.randint(2, 4))]

    def _run(self, run: Run, kill: bool) -> Stretch:
        counts = self.counts
        counts.runs += 1
        checkpoint = Checkpoint.load(Path(run.checkpoint))
        start = checkpoint.steps
        place = json.loads(checkpoint.loader) if start else {"epoch": 0, "consumed": 0}
        counts.resumed += place["consumed"] % NUM_SAMPLES > 0
        moment = None
        if kill:
            moment, hold = (start + step for step in self._moment(place, run.world_size * run.batch_size))
            run = replace(run, hold=hold)
        with Torchrun(run) as torchrun:
            if torchrun.wait_for(moment):
                time.sleep(self._random.random() * MOST_DELAY_SECONDS)
            elif torchrun.process.returncode:
                raise RuntimeError(f"failed by itself, code {torchrun.process.returncode}: {torchrun.output()}")
            torchrun.kill()
            logs = [torchrun.read_log(rank) for rank in range(run.world_size)]
        done = max((log[-1].step for log in logs if log), default=start)
        if torchrun.process.returncode == 0:
            return Stretch(run.batch_size, start, done, logs)
        stop = Checkpoint.load(Path(run.checkpoint)).steps
        counts.kills += logs[0][-1].state["consumed"] < NUM_SAMPLES
        counts.lost += done - stop
        return Stretch(run.batch_size, start, stop, logs)

    def _moment(self, place: dict[str, Any], global_batch_size: int) -> tuple[int, int]:
        """Returns a step to kill a run after, and the last it may do: both inside the epoch under way or the next."""
        left = -(-(NUM_SAMPLES - place["consumed"]) // global_batch_size)
        first, last = 1, left - 1
        if place["epoch"] + 1 < EPOCHS and (last < first or self._random.random() < 0.5):
            first, last = left + 1, left + NUM_SAMPLES // global_batch_size - 1
        last = max(first, last)
        return self._random.randint(first, last), last


def kill_training(
    rounds: int, seed: int = 0, shuffle: str = "global", folder: Path | None = None, say: Say = print
) -> Counts:
    """Does so many rounds in `folder`, by default a temporary one."""
    with tempfile.TemporaryDirectory(prefix="kill-train-", dir=folder) as made:
        killer = Killer(Path(made), seed, shuffle, say)
        for _ in range(rounds):
            killer.round()
    return killer.counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "the moments, the ranks and the batch sizes")
    parser.add_argument("--rounds", type=int, default=10, help="trainings; default %(default)s")
    parser.add_argument("--shuffle", choices=SHUFFLES, default="global", help="the order; default %(default)s")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.worker:
        train(Run(**json.loads(chosen.worker)))
    print(f"seed {chosen.seed}, shuffle {chosen.shuffle}", flush=True)
    return verdict(kill_training(chosen.rounds, chosen.seed, chosen.shuffle, chosen.folder))


if __name__ == "__main__":
    sys.exit(main())
