"""Reads some epochs of a set at full speed, then trains a small network on it, for `shardio demo`."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from hashlib import sha256
from itertools import count, pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from click import echo
from torch import nn

from shardio.augment.chain import Compose
from shardio.augment.transforms import HorizontalFlip, Normalize, RandomResizedCrop
from shardio.loading.loader import ShardLoader
from shardio.reading.shardset import open_shards

_EPOCHS = 3
_TRAIN_PIXELS = 64
_REPORTS = 6


def run_demo(out: Path, steps: int) -> None:
    """Reads some epochs of the set in `out`, trains on it for `steps` steps, and prints speed and accuracy."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _read(out, device)
    if open_shards(out).classes:
        _train(out, device, steps)
    else:
        echo("\nthe set has no classes: nothing is trained")


def _read(out: Path, device: torch.device) -> None:
    echo(f"\nreading {_EPOCHS} epochs to {device}, batches of 256")
    with ShardLoader(out, batch_size=256, tail="short", device=device) as loader:
        for epoch in range(_EPOCHS):
            start = time.perf_counter()
            count = nbytes = 0
            for images, *_ in loader:
                count += len(images)
                nbytes += images.nbytes
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            echo(f"  epoch {epoch}: {count / seconds:>10,.0f} images/s  {nbytes / seconds / 1e9:>6.2f} GB/s")


def _small_net(channels: int, num_classes: int) -> nn.Module:
    """Returns a network of four convolutions and a head that classifies pictures of _TRAIN_PIXELS pixels a side."""
    layers: list[nn.Module] = []
    for before, after in pairwise((channels, 32, 64, 128, 128)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, num_classes))


def _shrunk(images: torch.Tensor) -> torch.Tensor:
    """Returns uint8 pictures of the loader as input of the network: smaller, and as floats."""
    return (nn.functional.interpolate(images.float(), _TRAIN_PIXELS, mode="area") - 128) / 64


def _train(out: Path, device: torch.device, steps: int) -> None:
    shards = open_shards(out)
    num_classes = len(shards.classes)
    torch.manual_seed(0)
    model = _small_net(shards.sample_shape[2], num_classes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    batch_size = min(64, len(shards))
    echo(f"\ntraining a small network on {device}: {steps} steps, batches of {batch_size}, {num_classes} classes")
    losses: list[float] = []
    start = time.perf_counter()
    with ShardLoader(out, batch_size=batch_size, device=device) as loader:
        while len(losses) < steps:
            for images, labels in loader:
                loss = nn.functional.cross_entropy(model(_shrunk(images)), labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
                if len(losses) % max(1, steps // _REPORTS) == 0:
                    recent = losses[-max(1, steps // _REPORTS) :]
                    echo(f"  step {len(losses):>5}: loss {sum(recent) / len(recent):.3f}")
                if len(losses) == steps:
                    break
        waited = loader.stats()["wait_seconds"]
    seconds = time.perf_counter() - start
    echo(f"  {steps} steps in {seconds:.1f} s, of which {waited / seconds:.1%} waiting for data")
    if "val" in shards.manifest.splits:
        accuracy = _evaluate(model, out, device)
        echo(f"  accuracy on val: {accuracy:.1%} (chance {1 / num_classes:.1%})")


@torch.inference_mode()
def _evaluate(model: nn.Module, out: Path, device: torch.device) -> float:
    """Returns the accuracy on the split `val`. Reads each sample exactly once, by tail="short"."""
    model.eval()
    right = total = 0
    with ShardLoader(out, batch_size=256, split="val", shuffle=False, tail="short", device=device) as loader:
        for images, labels in loader:
            right += int((model(_shrunk(images)).argmax(1) == labels).sum())
            total += len(labels)
    return right / total


def train_rank(
    out: Path, folder: Path, rank: int, world_size: int, batch_size: int, last: int, save_every: int, pipe: Connection
) -> None:
    """Trains on the CPU as one rank, from the state in `folder`, and waits in step `last`.

    Sends the number of each step and the hashes of this rank's samples, before it learns from them.
    """
    torch.set_num_threads(1)
    # As torchrun sets them.
    world = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in world.items()})
    store = dist.FileStore(str(folder / f"ranks-{world_size}"), world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    shards = open_shards(out)
    torch.manual_seed(0)
    model = _small_net(shards.sample_shape[2], len(shards.classes))
    transform = Compose([RandomResizedCrop(_TRAIN_PIXELS), HorizontalFlip(), Normalize(0.5, 0.25)])
    state_file = folder / "state.pt"
    step = 0
    with ShardLoader(out, batch_size, transform=transform, device="cpu") as loader:
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
                if step == last:
                    signal.pause()
                nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
                _descend(model, world_size)
                if rank == 0 and step % save_every == 0:
                    state = {"step": step, "model": model.state_dict(), "loader": loader.state_dict()}
                    torch.save(state, state_file.with_suffix(".tmp"))
                    state_file.with_suffix(".tmp").replace(state_file)


@torch.no_grad()
def _descend(model: nn.Module, world_size: int) -> None:
    """Makes one step of SGD by the mean of the ranks' gradients.

    DistributedDataParallel and the optimizers import torch's compiler, which takes longer than this training.
    """
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.sub_(parameter.grad, alpha=0.05 / world_size)
        parameter.grad = None
