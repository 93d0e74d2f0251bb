"""`convert` beside a bare decode-and-resize loop on the same images: what do checking, hashing and writing cost?

The bare loop reads a file, decodes it with simplejpeg, resizes it with torch, and drops the result. It runs in one
process, and in one process per core at the same time, which is what the machine allows at most.
"""

from __future__ import annotations

import argparse
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import simplejpeg
import torch
from common import BUILD, describe_machine, in_turn, print_ratios

from shardio.converter import convert
from shardio.resize import Fit

FIT = Fit((256, 256))


def bare_loop(files: list[Path]) -> int:
    torch.set_num_threads(1)
    for file in files:
        FIT.apply(simplejpeg.decode_jpeg(file.read_bytes(), "RGB", strict=True))
    return len(files)


def repeat_images(images: Path, count: int) -> Path:
    """A tree of `count` links to the JPEGs of `images`, in their class folders: a longer run from a small sample."""
    tree = BUILD / f"repeated-{count}"
    shutil.rmtree(tree, ignore_errors=True)
    files = [file for file in sorted(images.rglob("*")) if file.is_file() and simplejpeg.is_jpeg(file.read_bytes())]
    for number in range(count):
        file = files[number % len(files)]
        folder = tree / file.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:06}.JPEG").symlink_to(file.resolve())
    return tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path, help="folder of class folders of JPEGs, such as ImageNet's train")
    parser.add_argument("--count", type=int, default=4000, help="images per round, repeated as needed")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shard-size", type=int, default=128 << 20)
    options = parser.parse_args()
    print(describe_machine())
    tree = repeat_images(options.images, options.count)
    files = sorted(tree.rglob("*.JPEG"))
    out = BUILD / "converted"

    def run(workers: int) -> int:
        shutil.rmtree(out, ignore_errors=True)
        report = convert(tree, out, workers=workers, shard_size=options.shard_size)
        return sum(report.num_samples.values())

    with ProcessPoolExecutor(options.cores, mp_context=get_context("spawn")) as pool:
        parts = [files[core :: options.cores] for core in range(options.cores)]
        list(pool.map(bare_loop, [part[:8] for part in parts]))  # start the processes
        ways = {
            "bare loop, 1 core": lambda: bare_loop(files),
            f"bare loop, {options.cores} cores": lambda: sum(pool.map(bare_loop, parts)),
            "convert, 1 worker": lambda: run(1),
            f"convert, {options.cores} workers": lambda: run(options.cores),
        }
        rates = in_turn(ways, options.rounds)
    print_ratios(rates, "bare loop, 1 core", "images/s")
    print(f"against {options.cores} cores of bare loop at the same time:")
    print_ratios(
        {k: v for k, v in rates.items() if str(options.cores) in k}, f"bare loop, {options.cores} cores", "images/s"
    )
    shutil.rmtree(out)


if __name__ == "__main__":
    main()
