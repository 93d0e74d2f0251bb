"""The costs of trees by their shape: folders of very many images, very many classes, long paths.

Every image is a link to one of a few files, so that little but names is in a tree. `convert`, `plan`, `info` and
opening are processes of their own. The first tree is a usual one of as many images.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import simplejpeg
from common import BUILD, describe_machine, measured, spread

SIZE = 8
_LINKS = 30_000  # a file may have so many, on any filesystem

OPEN = """
import sys
from shardio.reading.shardset import open_shards
shards = open_shards(sys.argv[1])
assert len(shards.classes) > int(shards.labels.max()) and shards[len(shards) - 1].image.size
"""


def names(shape: str, images: int) -> Iterator[str]:
    """Yields the paths of so many images."""
    for i in range(images):
        if shape == "usual":
            yield f"n{i % 1000:08d}/n{i % 1000:08d}_{i}.JPEG"
        elif shape == "one folder":
            yield f"n{0 if i else 1:08d}/n{i:08d}.JPEG"
        elif shape == "a class each":
            yield f"n{i:08d}/{i}.JPEG"
        else:  # 400 bytes each
            yield f"n{i % 1000:08d}/{'/'.join(['x' * 190] * 2)}/{i}.JPEG"


SHAPES = ("usual", "one folder", "a class each", "long paths")


def make_tree(root: Path, shape: str, images: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    picture = simplejpeg.encode_jpeg(pixels)
    for i, name in enumerate(names(shape, images)):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if i % _LINKS == 0:
            original = path
            path.write_bytes(picture)
        else:
            os.link(original, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=70_000, help="images in each tree (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    options = parser.parse_args()
    folder = BUILD / "trees"
    src, out = str(folder / "src"), str(folder / "out")
    shardio = [sys.executable, "-m", "shardio"]
    commands = {
        "convert": [*shardio, "convert", src, out, "--size", str(SIZE), "--workers", "1", "--labels", "folders"],
        "plan": [*shardio, "plan", src, "--seconds", "0.01", "--labels", "folders"],
        "info": [*shardio, "info", out],
        "open": [sys.executable, "-c", OPEN, out],
    }
    print(describe_machine())
    print(f"{options.images:,} images in each tree; seconds, and megabytes of memory")
    print(f"{'':>14}" + "".join(f"{name:>44}" for name in commands))
    for shape in SHAPES:
        shutil.rmtree(folder, ignore_errors=True)
        make_tree(folder / "src", shape, options.images)
        rounds = []
        for _ in range(options.rounds):
            shutil.rmtree(out, ignore_errors=True)
            rounds.append([measured(command) for command in commands.values()])
        cells = []
        for some in zip(*rounds, strict=True):
            seconds, megabytes = zip(*some, strict=True)
            cells.append(f"{spread(seconds, 2)}, {spread(megabytes, 0)}")
        print(f"{shape:>14}" + "".join(f"{cell:>44}" for cell in cells), flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
