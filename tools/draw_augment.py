"""Draws the contact sheets of docs/guide/augment.md: what each transform makes of a picture, which is drawn, too.

python tools/draw_augment.py [FOLDER] writes augment-*.png, by default into docs/guide/images. Text is readable on light
and dark pages; the background is transparent.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from shardio.augment import (
    AutoAugment,
    ColorJitter,
    Compose,
    CutMix,
    GaussianBlur,
    HorizontalFlip,
    Mixup,
    Pad,
    RandAugment,
    RandomAdjustSharpness,
    RandomAffine,
    RandomAutocontrast,
    RandomEqualize,
    RandomErasing,
    RandomGrayscale,
    RandomInvert,
    RandomPerspective,
    RandomPosterize,
    RandomResizedCrop,
    RandomRotation,
    RandomSolarize,
    Resize,
    TimmRandAugment,
    ToDtype,
    Transform,
    TrivialAugmentWide,
    VerticalFlip,
)

SIDE = 96
GAP = 8
LINE = 18
COLUMNS = 6
# Between black and white, so that it can be read on both.
GRAY = (128, 128, 128, 255)

Row = tuple[str, Sequence[tuple[str, Transform | None]]]


def drawn_picture(size: int = 256) -> Image.Image:
    """A house on a hill by a lake, under a sun: colors of all kinds, edges, smooth shades, and a left and a right."""
    rows, columns = np.mgrid[0:size, 0:size] / size
    sky = np.stack([90 + 140 * rows, 150 + 70 * rows, 235 - 30 * rows], axis=2)
    picture = Image.fromarray(sky.astype(np.uint8))
    draw = ImageDraw.Draw(picture)

    def points(*places: tuple[float, float]) -> list[tuple[float, float]]:
        return [(x * size, y * size) for x, y in places]

    def shape(color: str, *places: tuple[float, float]) -> None:
        draw.polygon(points(*places), fill=color)

    draw.ellipse(points((0.7, 0.08), (0.88, 0.26)), fill="#ffd23f")
    shape("#7a8fa6", (0, 0.62), (0.22, 0.3), (0.36, 0.5), (0.55, 0.24), (0.85, 0.62))
    shape("#f4f7fb", (0.16, 0.388), (0.22, 0.3), (0.28, 0.386), (0.225, 0.36))
    shape("#f4f7fb", (0.48, 0.335), (0.55, 0.24), (0.62, 0.33), (0.56, 0.305))
    hill = [(x, 0.66 - 0.1 * math.sin(math.pi * (x + 0.15))) for x in np.linspace(0, 1, 40)]
    shape("#5a9e4b", *hill, (1, 1), (0, 1))
    shape("#3d7fb8", (0, 0.86), (0.3, 0.8), (0.62, 0.84), (1, 0.78), (1, 1), (0, 1))
    shape("#d9c8a9", (0.24, 0.5), (0.5, 0.5), (0.5, 0.74), (0.24, 0.74))
    shape("#a63a2b", (0.19, 0.52), (0.37, 0.36), (0.55, 0.52))
    for left in (0.28, 0.4):
        draw.rectangle(points((left, 0.56), (left + 0.06, 0.63)), fill="#2b3a55")
    draw.rectangle(points((0.345, 0.64), (0.395, 0.74)), fill="#6b4a2f")
    draw.rectangle(points((0.755, 0.55), (0.785, 0.72)), fill="#5b3b22")
    draw.ellipse(points((0.67, 0.36), (0.87, 0.6)), fill="#2f6b35")
    shade = np.array(picture).astype(np.float64) + 3 * np.sin(40 * columns + 31 * rows)[..., None]
    return Image.fromarray(np.clip(shade, 0, 255).astype(np.uint8))


def jitter(name: str, values: Sequence[float]) -> Row:
    return f"ColorJitter({name}=)", [(f"{value:g}", ColorJitter(**{name: (value, value)})) for value in values]


def draws(transform: Transform, *, normalized: bool = False) -> Row:
    """Six draws; of a transform for normalized pictures after a cast, which stands for Normalize."""
    cast = ToDtype(torch.float32, scale=True)
    return repr(transform), [("", Compose([cast, transform]) if normalized else transform)] * COLUMNS


SHEETS: dict[str, list[Row]] = {
    "color": [
        jitter("brightness", (0.2, 0.6, 1.0, 1.4, 1.8, 2.4)),
        jitter("contrast", (0.0, 0.4, 1.0, 1.4, 2.0, 3.0)),
        jitter("saturation", (0.0, 0.4, 1.0, 1.5, 2.0, 3.0)),
        jitter("hue", (-0.5, -0.3, -0.1, 0.1, 0.2, 0.4)),
        (
            "RandomAdjustSharpness(sharpness_factor)",
            [(f"{f:g}", RandomAdjustSharpness(f, 1.0)) for f in (0, 1, 2, 4, 8, 16)],
        ),
        ("GaussianBlur(13, sigma)", [(f"{s:g}", GaussianBlur(13, (s, s))) for s in (0.1, 0.5, 1, 2, 3, 4)]),
        ("RandomPosterize(bits)", [(f"{bits}", RandomPosterize(bits, 1.0)) for bits in (6, 5, 4, 3, 2, 1)]),
        ("RandomSolarize(threshold)", [(f"{t}", RandomSolarize(t, 1.0)) for t in (256, 224, 192, 128, 64, 0)]),
        (
            "of one strength",
            [
                ("as it was", None),
                ("Grayscale", RandomGrayscale(1.0)),
                ("Invert", RandomInvert(1.0)),
                ("Autocontrast", RandomAutocontrast(1.0)),
                ("Equalize", RandomEqualize(1.0)),
            ],
        ),
    ],
    "geometry": [
        (
            "RandomRotation(degrees)",
            [(f"{a}", RandomRotation((a, a), "bilinear")) for a in (-90, -30, -10, 10, 45, 180)],
        ),
        (
            "RandomAffine(0, shear=)",
            [
                (f"{s}", RandomAffine(0, shear=(s[0], s[0], s[1], s[1]), interpolation="bilinear"))
                for s in ((-20, 0), (10, 0), (30, 0), (0, -20), (0, 20), (15, 15))
            ],
        ),
        (
            "RandomAffine(0, scale=)",
            [
                (f"{s:g}", RandomAffine(0, scale=(s, s), interpolation="bilinear"))
                for s in (0.5, 0.75, 0.9, 1.2, 1.6, 2.5)
            ],
        ),
        draws(RandomAffine(30, (0.2, 0.2), (0.7, 1.4), 10)),
        (
            "RandomPerspective(distortion_scale, 1.0)",
            [(f"{d}", RandomPerspective(d, 1.0)) for d in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)],
        ),
        draws(RandomResizedCrop(SIDE)),
        (
            "Pad(16), then resized; flips",
            [
                (mode, Compose([Resize(SIDE), Pad(16, 128, mode), Resize(SIDE)]))
                for mode in ("constant", "edge", "reflect", "symmetric")
            ]
            + [("HorizontalFlip", HorizontalFlip(1.0)), ("VerticalFlip", VerticalFlip(1.0))],
        ),
    ],
    "policies": [
        draws(RandAugment()),
        draws(RandAugment(2, 20)),
        draws(TrivialAugmentWide()),
        draws(AutoAugment()),
        draws(TimmRandAugment("rand-m9-mstd0.5-inc1")),
    ],
    "erasing": [
        draws(RandomErasing(1.0, value=128)),
        draws(RandomErasing(1.0, value="random", count=(1, 3)), normalized=True),
        draws(RandomErasing(1.0, value="color", count=(1, 3)), normalized=True),
        draws(Mixup(2, per_sample=True), normalized=True),
        draws(CutMix(2, per_sample=True)),
    ],
}


def changed(transform: Transform, images: torch.Tensor, *labels: torch.Tensor, **samples: Any) -> torch.Tensor:
    result = transform(images, *labels, **samples)
    first = result[0] if isinstance(result, tuple) else result
    assert isinstance(first, torch.Tensor)
    return first


def shown(transform: Transform | None, picture: torch.Tensor, number: int) -> Image.Image:
    """Returns what the transform makes of the picture as sample `number`, at SIDE pixels."""
    cropping = isinstance(transform, RandomResizedCrop | Compose) and not _keeps_pixels(transform)
    before = picture if cropping else changed(Resize(SIDE), picture)
    made = before
    if transform is not None:
        pair = torch.cat([before, before.flip(3).roll(1, dims=1)])  # with a partner to be mixed with
        made = changed(transform, pair, torch.tensor([0, 1]), indices=[number, number + 1000], seed=3)
    if made.dtype.is_floating_point:
        made = (made.clamp(0, 1) * 255).to(torch.uint8)
    return Image.fromarray(made[0].permute(1, 2, 0).numpy())


def _keeps_pixels(transform: Transform) -> bool:
    return isinstance(transform, Compose) and not any(isinstance(part, Resize) for part in transform.transforms)


def sheet(rows: Sequence[Row], picture: torch.Tensor) -> Image.Image:
    font = ImageFont.load_default(size=13)
    width = COLUMNS * (SIDE + GAP) + GAP
    height = sum(LINE + SIDE + GAP + (LINE if any(label for label, _ in shots) else 0) for _, shots in rows) + GAP
    page = Image.new("RGBA", (width, height), (0, 0, 0, 0))
    draw = ImageDraw.Draw(page)
    top = GAP
    for title, shots in rows:
        draw.text((GAP, top), " ".join(title.split()), fill=GRAY, font=font)
        top += LINE
        labeled = any(label for label, _ in shots)
        for column, (label, transform) in enumerate(shots):
            left = GAP + column * (SIDE + GAP)
            page.paste(shown(transform, picture, column), (left, top))
            draw.text((left, top + SIDE + 1), label, fill=GRAY, font=font)
        top += SIDE + GAP + (LINE if labeled else 0)
    return page


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs" / "guide" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    picture = torch.from_numpy(np.array(drawn_picture())).permute(2, 0, 1)[None]
    for name, rows in SHEETS.items():
        page = sheet(rows, picture).quantize(192, dither=Image.Dither.NONE)
        page.save(folder / f"augment-{name}.png", optimize=True)


if __name__ == "__main__":
    main()
