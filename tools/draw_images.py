"""Draws an ImageNet-like tree of pictures: OUT/train/<class>/*.JPEG and OUT/val/<class>/*.JPEG.

A stand-in for ImageNet where it is not at hand.  Sizes, bytes per pixel and rare oddities follow the real
set.  The classes can be learned, though from no single cue: each has its own outline, hues and
marking, shown at any place, size and light before an unrelated background.

The one idea: no noise is computed for a picture.  Each process builds a small bank of 8-bit noise fields
once; a surface is then a random crop of a field looked up in a random palette of 256 colors, and a picture
is a few surfaces pasted through masks.  All chance in its drawing comes from (seed, class, number), so its
bytes do not depend on which process draws it.
"""

import argparse
import colorsys
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageOps
from tqdm import tqdm

Floats = NDArray[np.float64]

MARKER = ".drawn.json"
VERSION = 1  # raise it when the same arguments come to give other bytes: old trees are then not taken for new

FIELD = 1024  # side of a noise field
LARGEST = 960  # longest side drawn as such; a larger picture is enlarged, and soft as large photographs are

SIZES = {
    (500, 375): 0.34, (500, 333): 0.14, (375, 500): 0.11, (333, 500): 0.06, (500, 400): 0.03,
    (500, 334): 0.03, (500, 357): 0.02, (400, 300): 0.02, (335, 500): 0.02, (500, 500): 0.01,
}  # fmt: skip
SHARE_444 = 0.25  # share of the JPEGs that have chroma at full resolution
SHARE_PROGRESSIVE = 0.02

# Shares of the images, but a tree of ODD_FROM images or more holds at least one of each.
ODDITIES = {
    "gray": 0.015, "cmyk": 0.001, "png": 0.0, "huge": 0.0007,
    "turned 3": 0.001, "turned 6": 0.004, "turned 8": 0.002,
}  # fmt: skip
ODD_FROM = 200
ORIENTATION = 0x0112  # the EXIF tag
UNTURN = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}


@cache
def bank() -> dict[str, list[Image.Image]]:
    rng = default_rng(0)
    smooth = [spectral(rng, 2.0) for _ in range(2)]
    rough = [spectral(rng, exponent) for exponent in (0.8, 1.0, 1.2)]
    leafy = [leaves(rng) + share * field for share, field in zip((30, 50, 80), rough, strict=True)]
    grain = [rng.normal(size=(FIELD, FIELD, 3)) for _ in range(3)]
    return {
        "smooth": [as_image(field, 48) for field in smooth],
        "rough": [as_image(field, 48) for field in rough],
        "leafy": [as_image(field, 48) for field in leafy],
        "grain": [as_image(field, deviation) for field, deviation in zip(grain, (2, 4, 7), strict=True)],
    }


def as_image(field: Floats, deviation: float) -> Image.Image:
    scaled = (field - field.mean()) * (deviation / field.std()) + 128
    return Image.fromarray(scaled.clip(0, 255).astype(np.uint8))


def spectral(rng: Generator, exponent: float) -> Floats:
    """Draws noise whose amplitude falls as frequency ** -exponent; in photographs the exponent is about 1.2."""
    frequency = np.hypot(np.fft.fftfreq(FIELD)[:, None], np.fft.rfftfreq(FIELD))
    frequency[0, 0] = np.inf
    field = np.fft.irfft2(np.fft.rfft2(rng.normal(size=(FIELD, FIELD))) * frequency**-exponent)
    return np.asarray(field / field.std())


def leaves(rng: Generator) -> Floats:
    """Draws blobs of all sizes covering each other: the edges that spectral noise lacks."""
    image = Image.new("L", (FIELD, FIELD), 128)
    pen = ImageDraw.Draw(image)
    for _ in range(3000):
        radius = 6 * rng.uniform(0.0005, 1) ** -0.5
        blob = rng.uniform(0, FIELD, 2) + radius * blot(rng)
        pen.polygon(blob.ravel().tolist(), fill=int(rng.integers(256)))
    return np.asarray(image, np.float64)


def crop(rng: Generator, name: str, width: int, height: int) -> Image.Image:
    fields = bank()[name]
    x, y = (int(rng.integers(FIELD - length + 1)) for length in (width, height))
    return fields[rng.integers(len(fields))].crop((x, y, x + width, y + height))


def paint(tones: Image.Image, colors: Floats) -> Image.Image:
    tones.putpalette((255 * colors).astype(np.uint8).tobytes())
    return tones.convert("RGB")


def palette(rng: Generator, shade: float, tint: float, saturation: float) -> Floats:
    """Returns 256 colors from dark ones of the hue ``shade`` to light ones of the hue ``tint``."""
    dark, light = rng.uniform(0, 0.3), rng.uniform(0.6, 1)
    stops = (
        colorsys.hsv_to_rgb(shade, saturation, dark),
        colorsys.hsv_to_rgb(tint, saturation, (dark + light) / 2),
        colorsys.hsv_to_rgb(tint, saturation / 2, light),
    )
    at = (50, rng.uniform(90, 170), 205)
    return np.stack([np.interp(np.arange(256), at, channel) for channel in zip(*stops, strict=True)], axis=1)


def scenery(rng: Generator, width: int, height: int) -> Image.Image:
    name = rng.choice(["smooth", "rough", "leafy"], p=(0.2, 0.3, 0.5))
    hue = rng.random()
    colors = palette(rng, hue + rng.normal(0, 0.1), hue, 0.8 * rng.random() ** 2)
    return paint(crop(rng, name, width, height), colors)


def outline(rng: Generator, lobes: int, depth: float, stretch: float, turn: float) -> Floats:
    """Returns a closed, lobed and somewhat irregular curve that fits the square from -1 to 1."""
    angle = np.linspace(0, 2 * np.pi, 64, endpoint=False)
    radius = 1 + depth * np.cos(lobes * angle)
    for harmonic in (2, 3, 5, 8):
        radius += rng.normal(0, 0.06) * np.cos(harmonic * angle + rng.uniform(0, 2 * np.pi))
    curve = radius * (np.cos(angle) + 1j * stretch * np.sin(angle)) * np.exp(1j * turn)
    points = np.stack([curve.real, curve.imag], axis=1)
    return np.asarray(points / np.abs(points).max())


def blot(rng: Generator) -> Floats:
    lobes = int(rng.integers(2, 7))
    return outline(rng, lobes, rng.uniform(0, 0.5), rng.uniform(0.3, 1), rng.uniform(0, 2 * np.pi))


class Kind:
    """The traits that the pictures of one class share."""

    def __init__(self, seed: int, label: int) -> None:
        rng = default_rng([seed, label, 0])  # pictures are numbered from 1
        self.hue = label * 0.618 % 1  # steps of the golden ratio keep any number of hues apart
        self.accent = rng.random()
        self.lobes, self.depth, self.stretch = 2 + label % 5, rng.uniform(0.1, 0.45), rng.uniform(0.5, 1)
        self.cycles = rng.uniform(2, 7)  # cycles of the marking across the object
        self.slant = rng.uniform(0, np.pi)
        self.crossed = rng.random() < 0.4

    def surface(self, rng: Generator, turn: float, side: int) -> Image.Image:
        """Draws a surface that is marked and rough, and darker towards the rim."""
        phase = np.linspace(0, 2 * np.pi * self.cycles * rng.uniform(0.85, 1.15), side)
        warp = np.asarray(crop(rng, "smooth", side, side)) * rng.uniform(0.005, 0.02)
        tone = stripes(phase, self.slant + turn, warp)
        if self.crossed:
            tone = np.minimum(tone, stripes(phase, self.slant + turn + np.pi / 2, warp))
        rough = crop(rng, "rough", side, side)
        tones = Image.blend(Image.fromarray((255 * tone).astype(np.uint8)), rough, 0.5)
        faded = rng.random() < 0.15  # some objects show none of the hues of their class
        hue, accent = rng.random(2) if faded else rng.normal((self.hue, self.accent), 0.05)
        skin = paint(tones, palette(rng, accent, hue, rng.uniform(0.25, 0.8)))
        ball = Image.radial_gradient("L").point([255 - level // 2 for level in range(256)])
        return ImageChops.multiply(skin, ball.resize((side, side)).convert("RGB"))


def stripes(phase: Floats, slant: float, warp: Floats) -> Floats:
    wave = np.sin(np.cos(slant) * phase + np.sin(slant) * phase[:, None] + warp)
    return np.asarray((1 + np.tanh(2 * wave)) / 2)


def draw(rng: Generator, kind: Kind, width: int, height: int) -> Image.Image:
    scale = min(1, LARGEST / max(width, height))
    canvas = background(rng, round(width * scale), round(height * scale))
    side, turn = round(min(canvas.size) * rng.triangular(0.45, 0.85, 1.1)), rng.normal(0, 0.3)
    curve = outline(rng, kind.lobes, kind.depth, kind.stretch, turn)
    place(rng, canvas, kind.surface(rng, turn, side), curve)
    if rng.random() < 0.3:
        clutter(rng, canvas)
    return photograph(rng, canvas).resize((width, height), Image.Resampling.BICUBIC)


def background(rng: Generator, width: int, height: int) -> Image.Image:
    """Draws two surfaces that meet along a level of a smooth field, with clutter, perhaps out of focus."""
    canvas = scenery(rng, width, height)
    level, steepness = rng.uniform(80, 180), rng.uniform(2, 60)
    cover = ((np.arange(256) - level) * steepness + 128).clip(0, 255).astype(int).tolist()
    canvas.paste(scenery(rng, width, height), (0, 0), crop(rng, "smooth", width, height).point(cover))
    for _ in range(rng.integers(4)):
        clutter(rng, canvas)
    blur = ImageFilter.BoxBlur(rng.uniform(0.5, 3))
    return canvas.filter(blur) if rng.random() < 0.3 else canvas


def clutter(rng: Generator, canvas: Image.Image) -> None:
    side = round(min(canvas.size) * rng.uniform(0.1, 0.4))
    place(rng, canvas, scenery(rng, side, side), blot(rng))


def place(rng: Generator, canvas: Image.Image, surface: Image.Image, curve: Floats) -> None:
    """Pastes the surface, cut along the curve, anywhere; a little of it may lie outside."""
    side = surface.width
    mask = Image.new("L", (2 * side, 2 * side))
    ImageDraw.Draw(mask).polygon(((curve + 1) * side).ravel().tolist(), fill=255)
    x, y = (round(rng.uniform(-0.15 * side, length - 0.85 * side)) for length in canvas.size)
    canvas.paste(surface, (x, y), mask.reduce(2))


def photograph(rng: Generator, scene: Image.Image) -> Image.Image:
    """Puts the scene in a colored and uneven light, as a camera with some grain sees it."""
    light = np.linspace(rng.uniform(0.5, 0.8) + rng.uniform(0, 0.2, 3), rng.uniform(0.85, 1, 3), 256)
    lit = ImageChops.multiply(scene, paint(crop(rng, "smooth", *scene.size), light))
    exposed = ImageOps.autocontrast(lit, cutoff=rng.uniform(0, 1), preserve_tone=True)
    return ImageChops.add(exposed, crop(rng, "grain", *scene.size), 1, -128)


def size(rng: Generator, oddity: str) -> tuple[int, int]:
    shares = np.array([*SIZES.values(), 1 - sum(SIZES.values())])
    common = [*SIZES, None][rng.choice(len(shares), p=shares)]
    if common and oddity != "huge":
        return common
    longer = rng.uniform(2500, 4000) if oddity == "huge" else np.clip(rng.lognormal(6.1, 0.6), 100, 1600)
    sides = round(longer), round(max(75, longer * rng.uniform(0.55, 1)))
    return sides if rng.random() < 0.7 else sides[::-1]


def save(rng: Generator, image: Image.Image, path: Path, oddity: str) -> None:
    exif = Image.Exif()
    if oddity == "gray":
        image = image.convert("L")
    elif oddity == "cmyk":
        image = image.convert("CMYK")
    elif oddity.startswith("turned"):
        exif[ORIENTATION] = int(oddity.split()[1])
        image = image.transpose(UNTURN[exif[ORIENTATION]])
    image.save(
        path,
        "PNG" if oddity == "png" else "JPEG",
        quality=96 if rng.random() < 0.65 else int(rng.triangular(60, 88, 96)),
        # Pillow would halve M, Y and K of a CMYK picture, a layout that real ones do not have.
        subsampling="4:4:4" if rng.random() < SHARE_444 or oddity == "cmyk" else "4:2:0",
        progressive=bool(rng.random() < SHARE_PROGRESSIVE),
        exif=exif,
    )


@dataclass(frozen=True)
class Picture:
    path: Path
    label: int
    number: int
    oddity: str


def draw_picture(picture: Picture, seed: int) -> None:
    rng = default_rng([seed, picture.label, picture.number])
    image = draw(rng, Kind(seed, picture.label), *size(rng, picture.oddity))
    save(rng, image, picture.path, picture.oddity)


def plan(out: Path, images: int, classes: int, val: float, seed: int) -> list[Picture]:
    rng = default_rng([seed, images, classes])
    names = [f"n{number:08}" for number in 1_440_000 + rng.integers(500, 13_000, classes).cumsum()]
    odd = oddities(rng, images)
    pictures = []
    for label, name in enumerate(names):
        count = images // classes + (label < images % classes)
        held_out = min(max(round(count * val), 1), count - 1) if val else 0
        for number in range(1, count + 1):
            path = out / ("val" if number <= held_out else "train") / name / f"{name}_{number}.JPEG"
            pictures.append(Picture(path, label, number, next(odd)))
    return pictures


def oddities(rng: Generator, images: int) -> Iterator[str]:
    """Returns the oddity of each image in turn, mostly none."""
    given: list[str] = []
    for oddity, share in ODDITIES.items():
        given += [oddity] * max(int(images * share), images >= ODD_FROM)
    given += [""] * (images - len(given))
    return (given[index] for index in rng.permutation(images))


def draw_tree(out: Path, *, images: int, classes: int, val: float, seed: int, processes: int) -> int:
    """Draws ``images`` pictures, train and val together. Returns how many, or 0 if the tree was there already."""
    if not (1 <= classes <= images and 0 <= val < 1 and seed >= 0 and processes >= 1):
        raise ValueError("needs 1 <= classes <= images, 0 <= val < 1, seed >= 0 and processes >= 1")
    drawn = json.dumps({"images": images, "classes": classes, "val": val, "seed": seed, "version": VERSION})
    marker = out / MARKER
    if marker.exists() and marker.read_text() == drawn:
        return 0
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is neither empty nor the finished tree of these arguments")
    pictures = plan(out, images, classes, val, seed)
    for folder in {picture.path.parent for picture in pictures}:
        folder.mkdir(parents=True)
    draw_all(pictures, seed, processes)
    marker.write_text(drawn)
    return images


def draw_all(pictures: list[Picture], seed: int, processes: int) -> None:
    draw_one = partial(draw_picture, seed=seed)
    bar = tqdm(total=len(pictures), unit="img", disable=None)  # None: shown on a terminal only
    with bar, ExitStack() as stack:
        done: Iterable[None] = map(draw_one, pictures)
        if processes > 1:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(processes))
            done = pool.imap_unordered(draw_one, pictures, chunksize=16)
        for _ in done:
            bar.update()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--images", type=int, default=3000, help="train and val together (%(default)s)")
    parser.add_argument("--classes", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--val", type=float, default=0.1, help="share of the images held out (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="(%(default)s)")
    arguments = parser.parse_args()
    try:
        drawn = draw_tree(**vars(arguments))
    except (OSError, ValueError) as error:
        sys.exit(f"draw_images: {error}")
    print(f"{arguments.out}: {f'{drawn} images drawn' if drawn else 'already drawn, nothing to do'}")


if __name__ == "__main__":
    main()
