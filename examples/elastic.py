"""Trains on 4 ranks, kills them, resumes on 3 and then on 5, and compares every global batch with an uninterrupted run.

It draws its own images, and trains on the CPU. Each start of the training has new processes, one for each rank. A
server that has imported torch once forks them.

python examples/elastic.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Generator
from contextlib import closing, suppress
from datetime import timedelta
from hashlib import sha256
from itertools import count, pairwise
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shardio import ShardLoader, ShardWriter, open_shards
from shardio.augment import Compose, HorizontalFlip, Normalize, RandomResizedCrop

GLOBAL_BATCH = 60  # a multiple of each number of ranks
RANKS = (4, 3, 5)
CLASSES = 10
SAMPLES = 630  # half a global batch is left over at the end of an epoch
SIDE = 32


class Run(NamedTuple):
    """One start of a training, up to step `last`, from the state that is in `folder`. States are saved there."""

    out: Path
    folder: Path
    world_size: int
    last: int
    save_every: int

    @property
    def batch_size(self) -> int:
        return GLOBAL_BATCH // self.world_size


def small_net(channels: int, num_classes: int) -> nn.Module:
    """Returns a network of four convolutions and a head that classifies pictures of any size."""
    layers: list[nn.Module] = []
    for before, after in pairwise((channels, 32, 64, 128, 128)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, num_classes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=45, help="training steps")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardio-demo-") as folder:
        draw_set(Path(folder, "shards"))
        compare_runs(Path(folder, "shards"), Path(folder), options.steps)


def draw_set(out: Path) -> None:
    """Writes a set of noise in ten colors, one for each class."""
    rng = np.random.default_rng(0)
    colors = rng.integers(0, 192, (CLASSES, 3), np.uint8)
    print(f"drawing {SAMPLES} pictures of {SIDE}x{SIDE} in {CLASSES} classes")
    with ShardWriter(out, (SIDE, SIDE, 3), classes=[f"color-{number}" for number in range(CLASSES)]) as writer:
        for number in range(SAMPLES):
            noise = rng.integers(0, 64, (SIDE, SIDE, 3), np.uint8)
            writer.append(colors[number % CLASSES] + noise, number % CLASSES)


def compare_runs(out: Path, folder: Path, steps: int) -> None:
    """Trains on 4, 3 and 5 ranks, killed in between, and compares all batches with one uninterrupted process.

    Ends the program at the first global batch that differs.
    """
    save_every = max(1, steps // 9)
    # Up to two steps after a state was saved: these steps come again.
    ends = [min(steps, steps * part // len(RANKS) + 2) for part in range(1, len(RANKS) + 1)]
    print(f"\ntraining for {steps} steps of {GLOBAL_BATCH} samples; the state is saved every {save_every} steps")
    compared: list[int] = []
    expected = dict(global_batches(Run(out, folder / "whole", 1, steps, save_every)))
    print(f"  1 process, uninterrupted: steps 1 to {steps}")
    for world_size, last in zip(RANKS, ends, strict=True):
        run = Run(out, folder / "pieces", world_size, last, save_every)
        first = len(compared)
        with closing(global_batches(run)) as batches:
            for step, samples in batches:
                if samples != expected[step]:
                    raise SystemExit(
                        f"step {step} on {world_size} ranks: expected the samples of the uninterrupted run, in the "
                        "same order and bit for bit, found other pixels or labels"
                    )
                compared.append(step)
        end = "" if world_size == RANKS[-1] else ", then killed"
        print(f"  {world_size} ranks of {run.batch_size} samples: steps {compared[first]} to {last}{end}")
    distinct = len(set(compared))
    if distinct < steps:
        raise SystemExit(f"expected {steps} steps, found {distinct}: a resumed training skipped steps")
    print(
        f"all {len(compared)} global batches are bit-equal to the uninterrupted run's: pixels, labels, order\n"
        f"  {distinct} steps, and {len(compared) - distinct} repeated: they came after the last saved state"
    )


def global_batches(run: Run) -> Generator[tuple[int, list[bytes]], None, None]:
    """Yields each step and the hashes of the samples in its global batch. Kills the ranks after the last step."""
    run.folder.mkdir(exist_ok=True)
    run_server()
    ranks: list[tuple[BaseProcess, Connection]] = []
    try:
        for rank in range(run.world_size):
            ranks.append(start(run, rank))
        step = 0
        while step < run.last:
            parts = [pipe.recv() for _, pipe in ranks]
            step = parts[0][0]
            yield step, [sample for _, samples in parts for sample in samples]
    except EOFError:
        raise SystemExit(f"one of {run.world_size} ranks ended early") from None
    finally:
        for process, _ in ranks:
            process.kill()
        for process, pipe in ranks:
            process.join()
            process.close()
            pipe.close()


def run_server() -> None:
    """Starts the server that forks the ranks, unless it is running. It imports torch without starting threads."""
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    resource_tracker.ensure_running()  # the server starts it otherwise, which unblocks the signal
    # Ctrl-C is for this process alone: the server and the ranks inherit the blocked signal.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start(run: Run, rank: int) -> tuple[BaseProcess, Connection]:
    """Starts a rank. Returns its process and the pipe that receives its part of each batch."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=train_rank, args=(run, rank, theirs), daemon=True)
    process.start()
    theirs.close()  # so only the rank has it, and receiving fails once the rank has ended
    return process, ours


def train_rank(run: Run, rank: int, pipe: Connection) -> None:
    """Trains as one rank, from the state in the folder, and waits in the last step to be killed.

    Sends the number of each step and the hashes of this rank's samples, before it learns from them.
    """
    torch.set_num_threads(1)
    # As torchrun sets them.
    world = {"RANK": rank, "WORLD_SIZE": run.world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": run.world_size}
    os.environ.update({name: str(value) for name, value in world.items()})
    store = dist.FileStore(str(run.folder / f"ranks-{run.world_size}"), run.world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=run.world_size, timeout=timedelta(seconds=60))
    shards = open_shards(run.out)
    torch.manual_seed(0)
    model = small_net(shards.sample_shape[2], len(shards.classes))
    transform = Compose([RandomResizedCrop(SIDE), HorizontalFlip(), Normalize(0.5, 0.25)])
    state_file = run.folder / "state.pt"
    step = 0
    with ShardLoader(run.out, run.batch_size, transform=transform, device="cpu") as loader:
        if state_file.exists():
            state = torch.load(state_file, weights_only=True)
            step = state["step"]
            model.load_state_dict(state["model"])
            loader.load_state_dict(state["loader"])
        for epoch in count(loader.state_dict()["epoch"]):
            loader.set_epoch(epoch)
            for images, labels in loader:
                step += 1
                samples = zip(images.numpy(), labels.numpy(), strict=True)
                pipe.send((step, [sha256(image.tobytes() + label.tobytes()).digest() for image, label in samples]))
                if step == run.last:
                    with suppress(EOFError):  # the parent was killed
                        pipe.recv()
                    return
                nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
                descend(model, run.world_size)
                if rank == 0 and step % run.save_every == 0:
                    state = {"step": step, "model": model.state_dict(), "loader": loader.state_dict()}
                    torch.save(state, state_file.with_suffix(".tmp"))
                    state_file.with_suffix(".tmp").replace(state_file)


@torch.no_grad()
def descend(model: nn.Module, world_size: int) -> None:
    """Makes one step of SGD by the mean of the ranks' gradients.

    DistributedDataParallel and the optimizers import torch's compiler, which takes longer than this training.
    """
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.sub_(parameter.grad, alpha=0.05 / world_size)
        parameter.grad = None


if __name__ == "__main__":
    main()
