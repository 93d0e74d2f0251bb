"""Reads some epochs of a set at full speed, then trains a small network on it, for `shardio demo`."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import torch
from click import echo
from torch import nn

from shardio.loading.loader import ShardLoader
from shardio.reading.shardset import open_shards

_EPOCHS = 3
_TRAIN_PIXELS = 64
_REPORTS = 6


def run_demo(out: Path, steps: int) -> None:
    """Reads some epochs of the set in `out`, trains on it for `steps` steps, and prints speed and accuracy."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _read(out, device)
    _train(out, device, steps)


def _read(out: Path, device: torch.device) -> None:
    echo(f"\nreading {_EPOCHS} epochs to {device}, batches of 256")
    with ShardLoader(out, batch_size=256, tail="short", device=device) as loader:
        for epoch in range(_EPOCHS):
            start = time.perf_counter()
            count = nbytes = 0
            for images, _labels in loader:
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
