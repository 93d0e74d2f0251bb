"""How far pixels are from others, in dB: PSNR of each image, and the median, 5th percentile and minimum of all.

First torch's uint8 kernel and `--quality fast` to Pillow: full decode, the same box and filter. `fast` changes only
JPEGs of at least four times the size, of which ImageNet has few: --size 64 shows what it does to most of them. Its
figures are over the images that it changes.

Then a set of `--pixels yuv420`, and one of JPEGs as FFCV packs them (4:2:0), to a set of plain pixels: stored samples,
and what a random-resized crop and the central crop of 7/8 of the side make of them.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from common import describe_machine
from numpy.typing import NDArray
from PIL import Image
from simplejpeg import decode_jpeg, encode_jpeg

from shardio.augment import CenterCrop, RandomResizedCrop, Transform
from shardio.augment.boxes import Draws, Looks
from shardio.augment.program import Program
from shardio.conversion.images.decode import decode_image
from shardio.conversion.images.fit import Fit
from shardio.conversion.options import Resample
from shardio.errors import DecodeError
from shardio.kernels.resample import Planes, to_yuv420
from shardio.kernels.rowcopy import Windows

FILTERS: dict[Resample, Image.Resampling] = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
}


def pillow_sample(data: bytes, fit: Fit) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(data)) as image:
        place = fit.placement(image.height, image.width)
        resized = image.convert("RGB").resize(place.resized[::-1], FILTERS[fit.resample])
    return np.asarray(resized)[place.top : place.top + fit.size[0], place.left : place.left + fit.size[1]]


def decibels(sample: NDArray[np.uint8], reference: NDArray[np.uint8]) -> float:
    """Returns PSNR over the sample's pixels, which is infinite if they are equal."""
    error = np.mean((sample.astype(float) - reference) ** 2)
    return float(10 * np.log10(255**2 / error)) if error else float("inf")


def encoded(samples: NDArray[np.uint8], quality: int) -> NDArray[np.uint8]:
    """Returns samples as they come back from JPEGs of this quality."""
    data = [encode_jpeg(sample, quality, colorspace="RGB", colorsubsampling="420") for sample in samples]
    return np.stack([decode_jpeg(each) for each in data])


def halved(samples: NDArray[np.uint8]) -> Planes:
    count, height, width, _ = samples.shape
    rows = np.empty((count, height * 3 // 2, width), np.uint8)
    to_yuv420(samples, rows)
    return Planes.packed(rows, Windows.whole(count, height, width), 3, halved=True)


def made(planes: Planes, transform: Transform | None, side: int) -> NDArray[np.uint8]:
    """Returns what a transform makes of the images; each set gets the same crops."""
    if transform is None:
        images = np.empty((len(planes), side, side, 3), np.uint8)
        planes.copy_images(images)
        return images
    numbers = np.arange(len(planes))
    program = Program.of(transform, Draws(0, 0, numbers, looks=Looks(numbers, numbers)), (side, side, 3))
    out = np.empty(program.results[0][0], np.uint8)
    program.make(planes, numbers, [out])
    return out


def compare_stored(samples: NDArray[np.uint8], size: int) -> None:
    sets = {f"JPEG {quality}": Planes.of_images(encoded(samples, quality)) for quality in (90, 95, 100)}
    crop = size * 7 // 8
    for name, transform in {"stored": None, "random": RandomResizedCrop(crop), "central": CenterCrop(crop)}.items():
        reference = made(Planes.of_images(samples), transform, size)
        for kind, planes in {"yuv420": halved(samples), **sets}.items():
            print_row(f"{name}, {kind}", list(map(decibels, made(planes, transform, size), reference)))


def print_row(name: str, values: Sequence[float]) -> None:
    if values:
        figures = f"median {np.median(values):.1f} dB, 5th percentile {np.percentile(values, 5):.1f}"
        print(f"{name:<28} {len(values):>5} images: {figures}, least {min(values):.1f}")
    else:
        print(f"{name:<28} no image is large enough")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, help="folder of images")
    parser.add_argument("--size", type=int, default=256)
    options = parser.parse_args()
    print(describe_machine())
    files = [file for file in sorted(options.images.rglob("*")) if file.is_file()]
    for resample in FILTERS:
        fit = Fit((options.size, options.size), "crop", resample)
        exact_to_pillow, fast_to_pillow, fast_to_exact, stored = [], [], [], []
        for file in files:
            data = file.read_bytes()
            try:
                exact = fit.apply(decode_image(data).pixels)
                reduced = decode_image(data, least_size=fit.least_size)
            except DecodeError:
                continue
            stored.append(exact)
            reference = pillow_sample(data, fit)
            exact_to_pillow.append(decibels(exact, reference))
            if reduced.reduction > 1:
                fast = fit.apply(reduced.pixels, reduced.source_size, reduced.reduction)
                fast_to_pillow.append(decibels(fast, reference))
                fast_to_exact.append(decibels(fast, exact))
        print_row(f"{resample}, exact to Pillow", exact_to_pillow)
        print_row(f"{resample}, fast to Pillow", fast_to_pillow)
        print_row(f"{resample}, fast to exact", fast_to_exact)
        if resample == "bicubic":
            compared = np.stack(stored)
    compare_stored(compared, options.size)


if __name__ == "__main__":
    main()
