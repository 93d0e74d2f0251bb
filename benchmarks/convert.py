"""`convert` beside a bare decode-and-resize loop, and beside other tools, on the same images and as many cores.

The bare loop reads a file, decodes it with simplejpeg, resizes it with torch, cuts it, and drops the result. It runs in
one process, and in one process per core at the same time. The converter's own loop does the same with the converter's
kernel, to the same pixels: what the machine allows at most. The Pillow path is what torchvision's Resize and CenterCrop
do to a PIL image. FFCV's writer gets the same pixels from the same Pillow path.

On a machine with other users believe the CPU time per image, not the rates.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
import torch
from common import BUILD, describe_machine, ratios, spread
from numpy.typing import NDArray
from PIL import Image

from shardio.conversion.convert import convert
from shardio.conversion.images.fit import Fit
from shardio.conversion.writing.shard_file import BLOCK_NBYTES

FIT = Fit((256, 256))
SAMPLE_NBYTES = 256 * 256 * 3
OUT = BUILD / "converted"


class Run(NamedTuple):
    images: int
    cpu_seconds: float


def timed(do: Callable[[], int]) -> Run:
    start = time.process_time()
    return Run(do(), time.process_time() - start)


def torch_sample(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    place = FIT.placement(*pixels.shape[:2])
    batch = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(batch, place.resized, mode="bicubic", antialias=True)
    top, left = place.top, place.left
    return resized[0].permute(1, 2, 0).numpy()[top : top + FIT.size[0], left : left + FIT.size[1]]


def decoding_loop(files: list[Path], fit: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]) -> Run:
    def loop() -> int:
        for file in files:
            fit(simplejpeg.decode_jpeg(file.read_bytes(), "RGB", strict=True))
        return len(files)

    torch.set_num_threads(1)
    return timed(loop)


def bare_loop(files: list[Path]) -> Run:
    return decoding_loop(files, torch_sample)


def own_loop(files: list[Path]) -> Run:
    return decoding_loop(files, FIT.apply)


def pillow_sample(file: Path) -> NDArray[np.uint8]:
    with Image.open(file) as image:
        place = FIT.placement(image.height, image.width)
        resized = image.convert("RGB").resize(place.resized[::-1], Image.Resampling.BICUBIC)
    box = (place.left, place.top, place.left + FIT.size[1], place.top + FIT.size[0])
    return np.asarray(resized.crop(box))


def pillow_loop(files: list[Path]) -> Run:
    def loop() -> int:
        for file in files:
            pillow_sample(file)
        return len(files)

    return timed(loop)


class PillowDataset:
    """The indexed dataset that FFCV's writer takes: (pixels, label)."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, i: int) -> tuple[NDArray[np.uint8], int]:
        return pillow_sample(self._files[i]), 0


def ffcv_writer(files: list[Path], workers: int) -> Run:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    OUT.mkdir(parents=True)
    fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
    DatasetWriter(str(OUT / "set.beton"), fields, num_workers=workers).from_indexed_dataset(PillowDataset(files))
    return Run(len(files), float("nan"))  # in processes of its own


def plain_writes(count: int) -> Run:
    """Writes blocks of pixels past the page cache, one after the other. Counts the images that they would hold."""
    OUT.mkdir(parents=True)
    memory = np.zeros(BLOCK_NBYTES + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    block = memory[start : start + BLOCK_NBYTES].data
    num_blocks = max(1, count * SAMPLE_NBYTES // BLOCK_NBYTES)

    def write() -> int:
        descriptor = os.open(OUT / "blocks", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(descriptor, 0, num_blocks * BLOCK_NBYTES)
        for _ in range(num_blocks):
            os.write(descriptor, block)
        os.fsync(descriptor)
        os.close(descriptor)
        return num_blocks * BLOCK_NBYTES // SAMPLE_NBYTES

    return timed(write)


def repeat_images(images: Path, count: int) -> Path:
    """Makes a tree of `count` links to the JPEGs of `images`, in their class folders, for a longer run."""
    tree = BUILD / f"repeated-{count}"
    shutil.rmtree(tree, ignore_errors=True)
    files = [file for file in sorted(images.rglob("*")) if file.is_file() and simplejpeg.is_jpeg(file.read_bytes())]
    for number in range(count):
        file = files[number % len(files)]
        link = tree / file.parent.name / f"{number:06}.JPEG"
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, link)
        except OSError:  # another filesystem
            link.symlink_to(file.resolve())
    return tree


def in_turn(ways: dict[str, Callable[[], Run]], rounds: int) -> Iterator[tuple[str, float, float]]:
    """Yields (way, images per second, CPU microseconds per image) of each way once per round, A B C A B C ..."""
    for _ in range(rounds):
        for name, way in ways.items():
            shutil.rmtree(OUT, ignore_errors=True)
            start = time.perf_counter()
            run = way()
            yield name, run.images / (time.perf_counter() - start), run.cpu_seconds / run.images * 1e6
    shutil.rmtree(OUT, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, help="folder of class folders of JPEGs, such as ImageNet's train")
    parser.add_argument("--count", type=int, default=4000, help="images per round, repeated as needed")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shard-size", type=int, default=512 << 20)
    options = parser.parse_args()
    cores: int = options.cores
    print(describe_machine())
    tree = repeat_images(options.images, options.count)
    files = sorted(tree.rglob("*.JPEG"))

    def run(workers: int) -> Run:
        def work() -> int:
            return sum(convert(tree, OUT, workers=workers, shard_size=options.shard_size).num_samples.values())

        run = timed(work)
        return run if workers <= 4 else run._replace(cpu_seconds=float("nan"))  # in processes of their own

    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        parts = [files[core::cores] for core in range(cores)]

        def at_once(loop: Callable[[list[Path]], Run]) -> Run:
            return Run(*map(sum, zip(*pool.map(loop, parts), strict=True)))  # type: ignore[arg-type]

        for loop in (bare_loop, own_loop):  # start the processes
            list(pool.map(loop, [part[:8] for part in parts]))
        one, many, converter = "bare loop, 1 core", f"bare loop, {cores} cores", f"convert, {cores} workers"
        own = f"the converter's own loop, {cores} cores"
        pillow, ffcv, disk = f"Pillow, {cores} cores", f"FFCV's writer, {cores} workers", "writing alone"
        ways: dict[str, Callable[[], Run]] = {
            one: lambda: bare_loop(files),
            many: lambda: at_once(bare_loop),
            own: lambda: at_once(own_loop),
            pillow: lambda: at_once(pillow_loop),
            "convert, 1 worker": lambda: run(1),
            converter: lambda: run(cores),
            disk: lambda: plain_writes(len(files)),
        }
        if importlib.util.find_spec("ffcv"):
            ways[ffcv] = lambda: ffcv_writer(files, cores)
        rates: dict[str, list[float]] = {name: [] for name in ways}
        cpu: dict[str, list[float]] = {name: [] for name in ways}
        for name, rate, microseconds in in_turn(ways, options.rounds):
            rates[name].append(rate)
            cpu[name].append(microseconds)

    print(f"{'':<40}{'images/s':>28}{'CPU us/image':>28}")
    for name in ways:
        print(f"{name:<40}{spread(rates[name], 0):>28}{spread(cpu[name], 0):>28}")
    if ffcv not in ways:
        print(f"{ffcv:<40}not measured: ffcv is not installed here")
    print(f"{converter}, medians of the rounds' ratios and their range:")
    for name, times in ((one, cores), (many, 1), (own, 1), (pillow, 1), (ffcv, 1), (disk, 1)):
        if name in ways:
            print_ratio(f"to {times} x {name}" if times > 1 else f"to {name}", rates[converter], rates[name], times)
    print_ratio(f"CPU time of {many}, to its own", cpu[many], cpu[converter])
    print_ratio(f"CPU time of {pillow}, to its own", cpu[pillow], cpu[converter])


def print_ratio(name: str, above: list[Any], below: list[Any], times: int = 1) -> None:
    print(f"  {name:<66}{ratios(above, [times * value for value in below])}")


if __name__ == "__main__":
    main()
