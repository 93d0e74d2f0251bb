"""The effect of shards on accuracy: the same network, trained on a set's samples and on the original JPEGs.

JPEGs     Pillow decodes the files, crops a random box of each, resizes it, and mirrors it or not: RandomResizedCrop and
          RandomHorizontalFlip by their definition, without any of shardio. Decoding gives the same pixels every time
          and is done once.
crop      `shardio convert` of the same files to --stored pixels, and shardio.augment on the batches of a ShardLoader.
squash    The same with --fit squash, which keeps what lies beyond the square in the center.
yuv420    The same with --pixels yuv420. Each network is evaluated on the first shards, too.

With --randaugment, RandAugment(2, 9) follows the crop and the flip: torchvision's for JPEGs, so that this needs an
environment with torchvision, and shardio.augment's for shards. With --narrow, pictures are cut first, to PNG files:
the width and the height in turn, so that crop and squash store different pixels of pictures that were squares.

Everything else is the same: the network, and for each seed its first weights; optimizer, schedule, steps, batch size.
Each network is evaluated on the pictures of its own way, and on the JPEGs, which tells whether training on shards also
serves pictures that never were in any. The ways take turns. Differences are paired by seed, with the 95% interval of
Student's t. They count as equal if the interval lies within 1.5 points; otherwise it says how many seeds would do.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from augment_peer import import_torchvision
from classic import RATIO, as_tensor, augmented, centered, normalized
from common import BUILD, describe_machine
from PIL import Image
from torch import nn

from shardio.augment import (
    CenterCrop,
    Compose,
    HorizontalFlip,
    Normalize,
    RandAugment,
    RandomResizedCrop,
    Resize,
    Transform,
)
from shardio.conversion.convert import convert
from shardio.format.layout import MANIFEST_NAME
from shardio.loading.loader import ShardLoader

Batch = tuple[torch.Tensor, torch.Tensor]

EVALUATED_AT_ONCE = 250
EQUAL = 1.5
"""The largest difference, in points, that counts as none."""
# Student's t of 2.5%, by degrees of freedom from 1 on.
T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09)


class Way(NamedTuple):
    """A source of pictures, as normalized float32 (B, 3, size, size)."""

    train: Callable[[int, int], Iterator[Batch]]  # takes a seed and an epoch
    val: list[Batch]


def short_side(size: int) -> int:
    """Returns the short side of images from whose center `size` pixels are evaluated: 256 for 224, as with ImageNet.

    It is larger by an even number, so that no crop has a margin of half a pixel, which might be rounded up or down.
    """
    return size + 2 * round(size / 14)


def randaugment() -> Callable[[torch.Tensor], torch.Tensor]:
    import_torchvision()
    from torchvision.transforms import v2

    policy: Callable[[torch.Tensor], torch.Tensor] = v2.RandAugment(2, 9)
    return policy


def way_of_jpegs(
    tree: Path,
    size: int,
    scale: tuple[float, float],
    batch_size: int,
    pool: ThreadPoolExecutor,
    policy: Callable[[torch.Tensor], torch.Tensor],
) -> Way:
    """`policy` changes one picture, uint8 (3, size, size), and draws from torch's generator."""
    files, labels = files_of(tree / "train")
    images = list(pool.map(decode, files))

    def train(seed: int, epoch: int) -> Iterator[Batch]:
        order = np.random.default_rng([seed, epoch]).permutation(len(images))

        def make(number: int) -> torch.Tensor:
            rng = np.random.default_rng([seed, epoch, number])
            return as_tensor(augmented(images[number], size, rng, scale))

        made = pool.map(make, order.tolist())  # as fast as the threads can: an epoch of small pictures needs no bound
        for first in range(0, len(order) - batch_size + 1, batch_size):
            chosen = order[first : first + batch_size]
            # In this thread, so that the generator's numbers are the same in every run.
            yield normalized(torch.stack(list(map(policy, islice(made, batch_size))))), labels[chosen]

    def resize(file: Path) -> torch.Tensor:
        return as_tensor(centered(decode(file), short_side(size), size))

    held_out, truth = files_of(tree / "val")
    pixels = normalized(torch.stack(list(pool.map(resize, held_out))))
    return Way(train, list(zip(pixels.split(EVALUATED_AT_ONCE), truth.split(EVALUATED_AT_ONCE), strict=True)))


def narrowed(tree: Path, out: Path, side: int) -> Path:
    """Returns a copy of a tree in which every other picture is `side` pixels wide, and the others are as high."""
    for number, file in enumerate(sorted(tree.glob("*/*/*"))):
        image = decode(file)
        width, height = (side, image.height) if number % 2 else (image.width, side)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        cut = (out / file.relative_to(tree)).with_suffix(".png")
        cut.parent.mkdir(parents=True, exist_ok=True)
        image.crop((left, top, left + width, top + height)).save(cut)
    return out


def files_of(folder: Path) -> tuple[list[Path], torch.Tensor]:
    """Returns files and labels: the numbers of the class folders in the order of their names."""
    folders = sorted(folder.iterdir())
    files = [(file, label) for label, path in enumerate(folders) for file in sorted(path.iterdir())]
    return [file for file, _ in files], torch.tensor([label for _, label in files])


def decode(file: Path) -> Image.Image:
    with Image.open(file) as image:
        return image.convert("RGB")


def way_of_shards(
    path: Path, size: int, scale: tuple[float, float], batch_size: int, policy: Sequence[Transform]
) -> Way:
    augment = Compose([RandomResizedCrop(size, scale, RATIO), HorizontalFlip(), *policy, Normalize("imagenet")])
    resize = Compose([Resize(short_side(size)), CenterCrop(size), Normalize("imagenet")])
    open_loader = partial(ShardLoader, path, device="cpu", rank=0, world_size=1)

    def train(seed: int, epoch: int) -> Iterator[Batch]:
        with open_loader(batch_size, seed=seed, transform=augment) as loader:
            loader.set_epoch(epoch)
            yield from loader

    with open_loader(EVALUATED_AT_ONCE, split="val", shuffle=False, tail="short", transform=resize) as loader:
        return Way(train, list(loader))


def make_network(num_classes: int) -> nn.Module:
    """Makes seven convolutions with batch normalization. Four of them halve height and width."""
    layers: list[nn.Module] = []
    channels_in = 3
    for channels, stride in ((32, 2), (64, 2), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1)):
        layers += [
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        ]
        channels_in = channels
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, num_classes)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def trained(way: Way, num_classes: int, seed: int, steps: int, options: argparse.Namespace) -> nn.Module:
    """Trains for `options.epochs` epochs, which together have `steps` batches."""
    torch.manual_seed(seed)
    network = make_network(num_classes)
    optimizer = torch.optim.AdamW(network.parameters(), lr=options.rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=options.rate, total_steps=steps)
    for epoch in range(options.epochs):
        with closing(way.train(seed, epoch)) as batches:  # type: ignore[type-var]
            for images, labels in batches:
                with torch.autocast("cpu", torch.bfloat16, enabled=options.bfloat16):
                    logits = network(images.contiguous(memory_format=torch.channels_last))
                    loss = nn.functional.cross_entropy(logits, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return network


@torch.inference_mode()
def accuracy(network: nn.Module, batches: Iterable[Batch]) -> float:
    """Returns the accuracy in percent."""
    network.eval()
    right = torch.cat([network(images).argmax(1) == labels for images, labels in batches])
    return 100 * right.float().mean().item()


def interval(gaps: Sequence[float]) -> tuple[float, float]:
    """Returns the mean, and how far its 95% interval reaches to each side."""
    return statistics.mean(gaps), T[min(len(gaps) - 1, len(T)) - 1] * spread(gaps) / math.sqrt(len(gaps))


def spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan


def print_table(title: str, found: dict[str, list[float]], reference: str) -> None:
    print(f"\n{title}, accuracy in %")
    width = max(map(len, found))
    for name, values in found.items():
        print(
            f"{name:<{width}}  mean {statistics.mean(values):.2f}, standard deviation {spread(values):.2f}   "
            f"seeds: {' '.join(f'{value:.2f}' for value in values)}"
        )
    for name, values in found.items():
        gaps = [value - other for value, other in zip(values, found[reference], strict=False)]
        if name != reference and len(gaps) > 1:
            mean, margin = interval(gaps)
            equal = abs(mean) + margin <= EQUAL
            needed = math.ceil((1.96 * spread(gaps) / EQUAL) ** 2)
            print(
                f"{name} - {reference}: {mean:+.2f}, 95% interval {mean - margin:+.2f} to {mean + margin:+.2f}, "
                + ("equal" if equal else "different" if abs(mean) > margin else f"open: {needed} seeds needed")
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "tree", type=Path, nargs="?", help="images in train/<class>/ and val/<class>/; drawn if no tree is given"
    )
    parser.add_argument("--images", type=int, default=4500, help="images to draw, train and val together (%(default)s)")
    parser.add_argument("--classes", type=int, default=10, help="classes to draw (%(default)s)")
    parser.add_argument("--val", type=float, default=1 / 3, help="share of the drawn images (%(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each way (%(default)s)")
    parser.add_argument("--epochs", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--size", type=int, default=48, help="side of the pictures to train on (%(default)s)")
    parser.add_argument("--stored", type=int, nargs="+", default=[256], help="sizes of the samples (256)")
    parser.add_argument("--fits", nargs="+", default=["crop", "squash"], help="(crop squash)")
    parser.add_argument("--pixels", nargs="+", default=["rgb"], help="(rgb)")
    parser.add_argument("--jpeg-seeds", type=int, help="trainings on JPEGs (as of each other way)")
    parser.add_argument("--narrow", type=int, metavar="PIXELS", help="cut one side of each picture to this")
    parser.add_argument("--scale", type=float, default=0.08, help="smallest share of a picture to crop (%(default)s)")
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate (%(default)s)")
    parser.add_argument("--bfloat16", action="store_true", help="train with autocast, for CPUs that multiply bfloat16")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch, and of Pillow (%(default)s)")
    parser.add_argument("--randaugment", action="store_true", help="augment further; needs torchvision")
    parser.add_argument(
        "--out", type=Path, default=BUILD / "accuracy", help="folder for drawn images and converted sets"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(describe_machine())
    tree: Path = options.tree or options.out / f"images-{options.images}-{options.classes}-{options.val:.3f}"
    if options.tree is None:
        sizes = [f"--images={options.images}", f"--classes={options.classes}", f"--val={options.val}"]
        draw = Path(__file__).resolve().parents[1] / "tools" / "draw_images.py"
        subprocess.run([sys.executable, str(draw), str(tree), *sizes], check=True, stdout=subprocess.DEVNULL)
    if options.narrow is not None:
        tree = narrowed(tree, options.out / f"{tree.name}-{options.narrow}", options.narrow)
    ways, scale = {}, (options.scale, 1.0)
    for stored, fit, pixels in product(options.stored, options.fits, options.pixels):
        path = options.out / f"{tree.name}-{stored}-{fit}-{pixels}"
        if not (path / MANIFEST_NAME).exists():
            convert(tree, path, size=stored, fit=fit, pixels=pixels)
        name = f"shards, {fit}" + f", {stored}" * (len(options.stored) > 1) + f", {pixels}" * (pixels != "rgb")
        policy = [RandAugment(2, 9)] * options.randaugment
        ways[name] = way_of_shards(path, options.size, scale, options.batch_size, policy)
    with ThreadPoolExecutor(options.threads) as pool:
        change = randaugment() if options.randaugment else torch.Tensor.contiguous
        ways = {"JPEGs": way_of_jpegs(tree, options.size, scale, options.batch_size, pool, change), **ways}
        run(ways, tree, options)


def run(ways: dict[str, Way], tree: Path, options: argparse.Namespace) -> None:
    num_classes = len(list((tree / "train").iterdir()))
    counts = [sum(1 for _ in (tree / split).glob("*/*")) for split in ("train", "val")]
    steps = options.epochs * (counts[0] // options.batch_size)
    print(
        f"{counts[0]} images to train on, {counts[1]} to evaluate on, {num_classes} classes; {options.size} x "
        f"{options.size} pixels, crops of {options.scale:.2f} to 1 of a picture, {steps} steps of {options.batch_size}"
    )
    own, jpegs, first = ({name: list[float]() for name in ways} for _ in range(3))
    reference = [*ways][1]
    for seed in range(options.seeds):
        for name, way in ways.items():
            if name == "JPEGs" and options.jpeg_seeds is not None and seed >= options.jpeg_seeds:
                continue
            start = time.perf_counter()
            network = trained(way, num_classes, seed, steps, options)
            seconds = time.perf_counter() - start
            own[name].append(accuracy(network, way.val))
            jpegs[name].append(accuracy(network, ways["JPEGs"].val))
            first[name].append(accuracy(network, ways[reference].val))
            print(
                f"seed {seed}, {name:<16} {own[name][-1]:.2f}, on JPEGs {jpegs[name][-1]:.2f} ({seconds:.0f} s)",
                flush=True,
            )
    print_table("evaluated on the pictures of each way", own, "JPEGs")
    print_table("evaluated on JPEGs", jpegs, "JPEGs")
    if len(options.pixels) > 1:
        print_table("evaluated on the pictures of each way", own, reference)
        print_table(f"evaluated on {reference}", first, reference)


if __name__ == "__main__":
    main()
