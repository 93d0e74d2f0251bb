"""A set of `--pixels yuv420` beside a plain set of the same pictures: conversion, batches, and staging, in turn.

    python benchmarks/halved.py IMAGES [--count 4000] [--size 256] [--rounds 7]

IMAGES are repeated until there are `--count`. Rates are images per second; ratios are those of the rounds, of yuv420 to
rgb. Batches come from the page cache, by as many threads as there are cores: whole images, crops of 7/8 of the side
with a flip, random-resized crops with a flip, and these normalized. Staging ends when the copy is on the disk.

With --memory, only whole batches of a set that is larger than the memory are read, from the disk, in a cgroup with a
limit (as root): before each epoch the set leaves the page cache.

With --slipstream, a shared library of libslipstream/libslipstream.cpp of harvard-visionlab/slipstream, one core makes
the boxes of RandomResizedCrop from rows in memory: the kernel in C, from rows of both kinds; and the functions of
slipstream, which make the whole picture RGB (yuv420p_to_rgb_buffer), and then crop and resize it (resize_crop).
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from common import BUILD, cgroup, describe_machine, in_turn, leave_the_page_cache, print_ratios

from shardio.augment import Compose, HorizontalFlip, Normalize, RandomCrop, RandomResizedCrop, Transform
from shardio.augment.boxes import Draws, Looks
from shardio.augment.program import Program
from shardio.augment.stage import Stage
from shardio.cache.stage import stage
from shardio.conversion.convert import convert
from shardio.kernels.resample import Planes
from shardio.kernels.rowcopy import Windows
from shardio.loading.loader import ShardLoader
from shardio.reading.shardset import open_shards

KINDS = ("rgb", "yuv420")


def converted(images: Path, out: Path, size: int, pixels: str) -> int:
    shutil.rmtree(out, ignore_errors=True)
    return sum(convert(images, out, size=size, pixels=pixels, labels="none").num_samples.values())


def epoch(path: Path, transform: Transform | None) -> int:
    with ShardLoader(path, 256, device="cpu", transform=transform) as loader:
        return sum(len(batch[0]) for batch in loader)


def staged(path: Path, cache: Path, count: int) -> int:
    shutil.rmtree(cache, ignore_errors=True)
    stage(path, cache)
    return count


def cold_rate(path: Path, procs: Path) -> float:
    """Returns the images per second of an epoch in a process of the cgroup, once the set has left the page cache."""
    leave_the_page_cache(path)
    words = [sys.executable, __file__, "--epoch", path, path]
    join = partial(procs.write_text, "0")
    return float(subprocess.run([*map(str, words)], check=True, preexec_fn=join, stdout=subprocess.PIPE).stdout)


def boxes_on_one_core(library: Path, path: Path, plain: Path, crop: int, rounds: int) -> None:
    native = ctypes.CDLL(str(library))
    shards, count = open_shards(path), 256
    height, width, _ = shards.sample_shape
    rows = np.concatenate([np.load(path / entry.file)[:count] for entry in shards.content.shards])[:count]
    pictures = np.concatenate([np.load(plain / entry.file)[:count] for entry in open_shards(plain).content.shards])[
        :count
    ]
    numbers = np.arange(count)
    draws = Draws(0, 0, numbers, looks=Looks(numbers, numbers))
    program = Program.of(RandomResizedCrop(crop), draws, shards.sample_shape)
    (stage,) = program.views[0].stages
    assert isinstance(stage, Stage)
    out, room = np.empty((count, crop, crop, 3), np.uint8), np.empty((height, width, 3), np.uint8)
    sides = stage.windows().sides.tolist()

    def ours(planes: Planes) -> int:
        stage.resample(planes, numbers, out)
        return count

    def theirs() -> int:
        for row, made, (top, left, tall, wide) in zip(rows, out, sides, strict=True):
            pointers = [ctypes.c_int64(array.ctypes.data) for array in (room, made)]
            native.yuv420p_to_rgb_buffer(
                ctypes.c_void_p(row.ctypes.data),
                ctypes.c_uint64(row.size),
                ctypes.c_void_p(room.ctypes.data),
                *map(ctypes.c_uint32, (height, width, width)),
            )
            numbers = (height, width, top, left, tall, wide)
            native.resize_crop(
                pointers[0], *map(ctypes.c_int64, numbers), pointers[1], *map(ctypes.c_int64, (crop, crop, width, 0))
            )
        return count

    # resize_crop's order: source, its height and width, the box, the result, its height and width, both strides.
    whole = Windows.whole(count, height, width)
    ways = {
        "slipstream": theirs,
        "yuv420": partial(ours, Planes.packed(rows, whole, 3, halved=True)),
        "rgb": partial(ours, Planes.of_images(pictures)),
    }
    in_turn(ways, 1)
    print("boxes on one core")
    print_ratios(in_turn(ways, rounds), "slipstream", "images/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, help="folder of JPEGs")
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", type=float, metavar="GB")
    parser.add_argument("--slipstream", type=Path, metavar="LIBRARY")
    parser.add_argument("--epoch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.epoch is not None:
        print(in_turn({"epoch": partial(epoch, options.epoch, None)}, 1)["epoch"][0])
        return
    print(describe_machine())
    folder = BUILD / "halved"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "images").mkdir(parents=True)
    files = [file for file in sorted(options.images.rglob("*")) if file.is_file()]
    for number, file in enumerate(islice(cycle(files), options.count)):
        (folder / "images" / f"{number:06d}{file.suffix}").symlink_to(file.resolve())
    crop = options.size * 7 // 8
    boxed = [RandomResizedCrop(crop), HorizontalFlip()]
    transforms: dict[str, Transform | None] = {
        "whole": None,
        "crop, flip": Compose([RandomCrop(crop), HorizontalFlip()]),
        "random-resized crop, flip": Compose(boxed),
        "normalized": Compose([*boxed, Normalize("imagenet")]),
    }
    sets = {kind: folder / kind for kind in KINDS}
    groups: dict[str, dict[str, Callable[[], int]]] = {
        "conversion": {kind: partial(converted, folder / "images", sets[kind], options.size, kind) for kind in KINDS},
        **{name: {kind: partial(epoch, sets[kind], made) for kind in KINDS} for name, made in transforms.items()},
        "staging": {kind: partial(staged, sets[kind], folder / f"cache-{kind}", options.count) for kind in KINDS},
    }
    if options.memory is not None:
        for kind in KINDS:
            groups["conversion"][kind]()
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        with cgroup(int(options.memory * 1e9)) as procs:
            for _ in range(options.rounds):
                for kind in KINDS:
                    rates[kind].append(cold_rate(sets[kind], procs))
        print_ratios(rates, "rgb", "images/s")
        shutil.rmtree(folder)
        return
    for name, ways in groups.items():
        in_turn(ways, 1)
        print(name)
        print_ratios(in_turn(ways, options.rounds), "rgb", "images/s")
    if options.slipstream is not None:
        boxes_on_one_core(options.slipstream, sets["yuv420"], sets["rgb"], crop, options.rounds)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
