"""Converts a folder of images, and times the same batches from JPEGs by torch's DataLoader and by ShardLoader.

python examples/demo.py imagenet/ --out shards/
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from shardio import ShardLoader, open_shards
from shardio.augment import Compose, HorizontalFlip, Normalize, RandomResizedCrop

BATCH_SIZE = 64
SIDE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", help="folder of images")
    parser.add_argument("--out", help="keep the set in this folder; the default is a temporary folder, in TMPDIR")
    parser.add_argument("--size", default="256", help="pixels of the set's images, as of `shardio convert`")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each loader is timed; default 10")
    options = parser.parse_args()
    with ExitStack() as stack:
        out = options.out
        if out is None:
            out = str(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardio-demo-")), "shards"))
        run("plan", options.images, out, "--size", options.size)
        run("convert", options.images, out, "--size", options.size)
        run("verify", out)
        compare(Path(options.images), out, options.seconds)
        kept = f"next:\n  shardio view {out}\n  shardio report {out}\n  shardio bench {out}"
        print(kept if options.out else f"{out} is removed now; --out FOLDER keeps the set")


def run(*words: str) -> None:
    """Runs a command of shardio. Ends this program if the command fails."""
    print(f"$ shardio {' '.join(words)}", flush=True)
    if code := subprocess.run([sys.executable, "-m", "shardio", *words], check=False).returncode:
        sys.exit(code)
    print()


class Photographs(Dataset[torch.Tensor]):
    """JPEGs in a folder, each cut at random, resized, flipped and normalized, as most training scripts do it."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(self.paths[index]) as file:
            image = file.convert("RGB")
        area = image.width * image.height * random.uniform(0.08, 1.0)
        ratio = random.uniform(3 / 4, 4 / 3)
        width, height = min(image.width, (area * ratio) ** 0.5), min(image.height, (area / ratio) ** 0.5)
        left, top = random.uniform(0, image.width - width), random.uniform(0, image.height - height)
        image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, (left, top, left + width, top + height))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(255)
        return (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def compare(images: Path, out: str, seconds: float) -> None:
    paths = [path for path in images.rglob("*") if path.suffix.lower() in (".jpeg", ".jpg", ".png")]
    if not paths:
        print(f"{images}: found no files .jpeg, .jpg or .png to compare with\n")
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    batch_size = min(BATCH_SIZE, len(paths), len(open_shards(out)))
    print(
        f"random crops of {SIDE} x {SIDE}, normalized, as float32 batches on the CPU, with {cores} workers or threads:"
    )
    plain = DataLoader(
        Photographs(paths), batch_size, shuffle=True, drop_last=True, num_workers=cores, persistent_workers=True
    )
    transform = Compose([RandomResizedCrop(SIDE), HorizontalFlip(), Normalize("imagenet")])
    by_plain = rate(plain, seconds)
    print(f"  Dataset with Pillow, DataLoader  {by_plain:>8,.0f} images/s", flush=True)
    with ShardLoader(out, batch_size=batch_size, transform=transform, device="cpu", num_threads=cores) as loader:
        by_shards = rate(loader, seconds)
    print(f"  ShardLoader                      {by_shards:>8,.0f} images/s")
    print(f"{by_shards / by_plain:.1f} x\n")


def rate(loader: Iterable[torch.Tensor | tuple[torch.Tensor, ...]], seconds: float) -> float:
    """Returns the images per second of a loader, over its epochs from the first batch of the second epoch on."""
    start, count = 0.0, 0
    for epoch in range(sys.maxsize):
        for batch in loader:
            if epoch and not start:
                start = time.perf_counter()
            elif start:
                count += len(batch if isinstance(batch, torch.Tensor) else batch[0])
        if start and time.perf_counter() - start > seconds and count:
            break
    return count / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
