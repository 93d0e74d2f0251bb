"""Converts a folder of images, reads some epochs of the set at full speed, and trains a small network on it.

python examples/demo.py imagenet/ --out shards/
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from shardio import ShardLoader, open_shards

EPOCHS = 3
TRAIN_PIXELS = 64
REPORTS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", help="folder of images")
    parser.add_argument("--out", help="keep the set in this folder; the default is a temporary folder, in TMPDIR")
    parser.add_argument("--size", default="256", help="pixels of the set's images, as of `shardio convert`")
    parser.add_argument("--steps", type=int, default=30, help="training steps")
    options = parser.parse_args()
    with ExitStack() as stack:
        out = options.out
        if out is None:
            out = str(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardio-demo-")), "shards"))
        run("convert", options.images, out, "--size", options.size)
        run("info", out)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        read(out, device)
        if open_shards(out).classes:
            train(out, device, options.steps)
        else:
            print("\nthe set has no classes: nothing is trained")
        print(f"\nnext: shardio view {out}" if options.out else f"\n{out} is removed now; --out FOLDER keeps the set")


def run(*words: str) -> None:
    """Runs a command of shardio. Ends this program if the command fails."""
    print(f"$ shardio {' '.join(words)}", flush=True)
    if code := subprocess.run([sys.executable, "-m", "shardio", *words], check=False).returncode:
        sys.exit(code)
    print()


def read(out: str, device: torch.device) -> None:
    print(f"reading {EPOCHS} epochs to {device}, batches of 256")
    with ShardLoader(out, batch_size=256, tail="short", device=device) as loader:
        for epoch in range(EPOCHS):
            start = time.perf_counter()
            count = nbytes = 0
            for images, *_ in loader:
                count += len(images)
                nbytes += images.nbytes
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            print(f"  epoch {epoch}: {count / seconds:>10,.0f} images/s  {nbytes / seconds / 1e9:>6.2f} GB/s")


def small_net(channels: int, num_classes: int) -> nn.Module:
    """Returns a network of four convolutions and a head that classifies pictures of TRAIN_PIXELS pixels a side."""
    layers: list[nn.Module] = []
    for before, after in pairwise((channels, 32, 64, 128, 128)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, num_classes))


def shrunk(images: torch.Tensor) -> torch.Tensor:
    """Returns uint8 pictures of the loader as input of the network: smaller, and as floats."""
    return (nn.functional.interpolate(images.float(), TRAIN_PIXELS, mode="area") - 128) / 64


def train(out: str, device: torch.device, steps: int) -> None:
    shards = open_shards(out)
    num_classes = len(shards.classes)
    torch.manual_seed(0)
    model = small_net(shards.sample_shape[2], num_classes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    batch_size = min(64, len(shards))
    print(f"\ntraining a small network on {device}: {steps} steps, batches of {batch_size}, {num_classes} classes")
    losses: list[float] = []
    start = time.perf_counter()
    with ShardLoader(out, batch_size=batch_size, device=device) as loader:
        while len(losses) < steps:
            for images, labels in loader:
                loss = nn.functional.cross_entropy(model(shrunk(images)), labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
                if len(losses) % max(1, steps // REPORTS) == 0:
                    recent = losses[-max(1, steps // REPORTS) :]
                    print(f"  step {len(losses):>5}: loss {sum(recent) / len(recent):.3f}")
                if len(losses) == steps:
                    break
        waited = loader.stats()["wait_seconds"]
    seconds = time.perf_counter() - start
    print(f"  {steps} steps in {seconds:.1f} s, of which {waited / seconds:.1%} waiting for data")
    if "val" in shards.manifest.splits:
        accuracy = evaluate(model, out, device)
        print(f"  accuracy on val: {accuracy:.1%} (chance {1 / num_classes:.1%})")


@torch.inference_mode()
def evaluate(model: nn.Module, out: str, device: torch.device) -> float:
    """Returns the accuracy on the split `val`. Reads each sample exactly once, by tail="short"."""
    model.eval()
    right = total = 0
    with ShardLoader(out, batch_size=256, split="val", shuffle=False, tail="short", device=device) as loader:
        for images, labels in loader:
            right += int((model(shrunk(images)).argmax(1) == labels).sum())
            total += len(labels)
    return right / total


if __name__ == "__main__":
    main()
