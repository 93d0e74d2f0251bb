"""What resizing with torch's uint8 kernel changes, against Pillow: full decode, the same box, the same filter."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
from common import describe_machine
from PIL import Image

from shardio.decode import decode_image
from shardio.errors import DecodeError
from shardio.resize import Fit, Resample

FILTERS: dict[Resample, Image.Resampling] = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
}


def psnr(data: bytes, fit: Fit) -> float:
    """dB over the sample's pixels; infinite if they are equal."""
    sample = fit.apply(decode_image(data).pixels)
    with Image.open(io.BytesIO(data)) as image:
        place = fit.place(image.height, image.width)
        resized = image.convert("RGB").resize(place.resized[::-1], FILTERS[fit.resample])
    reference = np.asarray(resized)[place.top : place.top + fit.size[0], place.left : place.left + fit.size[1]]
    error = np.mean((sample.astype(float) - reference) ** 2)
    return float(10 * np.log10(255**2 / error)) if error else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path, help="folder of images")
    parser.add_argument("--size", type=int, default=256)
    options = parser.parse_args()
    print(describe_machine())
    files = [file for file in sorted(options.images.rglob("*")) if file.is_file()]
    for resample in FILTERS:
        fit = Fit((options.size, options.size), "crop", resample)
        values = []
        for file in files:
            try:
                values.append(psnr(file.read_bytes(), fit))
            except DecodeError:
                continue
        median, fifth = np.median(values), np.percentile(values, 5)
        figures = f"median {median:.1f} dB, 5th percentile {fifth:.1f}, least {min(values):.1f}"
        print(f"{resample:<9} {len(values)} images: {figures}")


if __name__ == "__main__":
    main()
