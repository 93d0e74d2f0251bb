"""Pixels of shardio.augment beside those of torchvision, Pillow and timm: the same pictures and the same parameters.

For each operation, and for each manipulation of RandAugment, TrivialAugmentWide, AutoAugment and
TimmRandAugment at several magnitudes: the worst and the median PSNR of the pictures, and the largest difference of two
gray levels. "same" is the PSNR of equal pixels. Policies are called with random numbers that choose one manipulation,
so that their tables of magnitudes are compared too.

    python benchmarks/compare_torchvision.py IMAGES --torchvision-python peers/bin/python

The other libraries run in the environment of --torchvision-python, which needs torchvision and Pillow, and timm for the
last part.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from common import describe_machine
from numpy.typing import NDArray
from PIL import Image

from shardio.augment import AutoAugment, RandAugment, TimmRandAugment, TrivialAugmentWide
from shardio.augment.batch import Batch
from shardio.augment.boxes import Draws
from shardio.augment.chain import Transform
from shardio.augment.geometry import affine, perspective
from shardio.augment.policies import _LEARNED, _SPACE
from shardio.augment.steps import Op, Sampling

PEER = Path(__file__).with_name("compare_torchvision_peer.py")
# Not square, so that an exchange of height and width shows.
HEIGHT, WIDTH = 200, 224
FILL = (10.0, 100.0, 200.0)
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """What another library does, by a name and arguments that JSON holds, and what shardio does instead."""

    title: str
    library: str
    call: str
    arguments: Sequence[Any]
    ours: Callable[[Batch], Batch]


def op(op: Op, *values: float) -> Callable[[Batch], Batch]:
    return lambda batch: batch.stepped(op, *values)


class Given(Draws):
    """Returns the same given numbers for each sample."""

    def __init__(self, numbers: Callable[[str, int], Sequence[float]], count: int) -> None:
        super().__init__(0, 0, np.arange(count))
        object.__setattr__(self, "numbers", numbers)

    def uniform(self, purpose: str, count: int) -> NDArray[np.float64]:
        numbers = np.array(self.numbers(purpose, count), np.float64)  # type: ignore[attr-defined]
        assert len(numbers) == count
        return np.repeat(numbers[:, None], len(self.counters), axis=1)

    def normal(self, purpose: str, count: int) -> NDArray[np.float64]:
        return np.zeros((count, len(self.counters)))


def given(transform: Transform, numbers: Callable[[str, int], Sequence[float]]) -> Callable[[Batch], Batch]:
    def change(batch: Batch) -> Batch:
        return transform.apply(Batch(batch.images, Given(numbers, len(batch)), batch.sizes), "policy")

    return change


def of_colors(library: str) -> Iterator[Case]:
    factors = (0.1, 0.5, 1.3, 1.9)
    for call, code in (
        ("brightness", Op.BRIGHTNESS),
        ("contrast", Op.CONTRAST),
        ("saturation", Op.SATURATION),
        ("sharpness", Op.SHARPNESS),
    ):
        for factor in factors:
            yield Case(f"{call} {factor}", library, call, [factor], op(code, factor))
    for bits in (1, 4, 7):
        yield Case(f"posterize {bits}", library, "posterize", [bits], op(Op.POSTERIZE, bits))
    for threshold in (0, 100.5, 128, 255):
        yield Case(f"solarize {threshold}", library, "solarize", [threshold], op(Op.SOLARIZE, threshold))
    for call, code in (
        ("invert", Op.INVERT),
        ("autocontrast", Op.AUTOCONTRAST),
        ("equalize", Op.EQUALIZE),
        ("grayscale", Op.GRAYSCALE),
        ("horizontal flip", Op.MIRROR),
        ("vertical flip", Op.FLIP),
    ):
        yield Case(call, library, call, [], op(code))


MAPS: list[dict[str, Any]] = [
    {"angle": 30.0},
    {"angle": -13.7, "translate": (5, -9), "scale": 0.8, "shear": (3.0, 11.0)},
    {"translate": (20, -7)},
    {"shear": (10.0, 0.0)},
]
CORNERS = np.array([[0, 0], [WIDTH - 1, 0], [WIDTH - 1, HEIGHT - 1], [0, HEIGHT - 1]], np.float64)
SEEN = np.array([[20, 13], [200, 3], [211, 180], [11, 190]], np.float64)
MIDDLE = (WIDTH / 2, HEIGHT / 2)


def of_torchvision() -> Iterator[Case]:
    yield from of_colors("torchvision")
    for share in (-0.5, -0.1, 0.05, 0.3):
        yield Case(f"hue {share}", "torchvision", "hue", [share], op(Op.HUE, share))
    for size, sigma in ((3, 0.5), (9, 2.0), (23, 0.1), (23, 1.1)):
        yield Case(
            f"blur of {size} pixels, sigma {sigma}",
            "torchvision",
            "blur",
            [size, sigma],
            op(Op.BLUR, size, size, sigma, sigma),
        )
    for name, reading in (("nearest", Sampling.NEAREST), ("bilinear", Sampling.BILINEAR)):
        for fill in (None, (0.0,) * 3, FILL):
            color = (NAN,) * 3 if fill is None else fill
            how = f"{name}, fill {None if fill is None else tuple(map(int, fill))}"
            for number, numbers in enumerate(MAPS):
                values = affine(MIDDLE, **numbers)
                yield Case(
                    f"affine {number + 1}, {how}",
                    "torchvision",
                    "affine",
                    [numbers, name, fill],
                    op(Op.AFFINE, *values, 0, 0, reading, *color),  # type: ignore[arg-type]
                )
            values = affine(MIDDLE, -25.0)
            yield Case(
                f"rotate 25, {how}",
                "torchvision",
                "rotate",
                [25.0, name, fill],
                op(Op.AFFINE, *values, 0, 0, reading, *color),  # type: ignore[arg-type]
            )
            eight = [float(value[0]) for value in perspective(SEEN[:, :, None], CORNERS)]
            yield Case(
                f"perspective, {how}",
                "torchvision",
                "perspective",
                [CORNERS.astype(int).tolist(), SEEN.astype(int).tolist(), name, fill],
                op(Op.PERSPECTIVE, *eight, reading, *color),
            )


def of_pillow() -> Iterator[Case]:
    yield from of_colors("Pillow")
    for name, reading in (("bilinear", Sampling.PILLOW_BILINEAR), ("bicubic", Sampling.PILLOW_BICUBIC)):
        for number, numbers in enumerate(MAPS):
            values = [float(value) for value in affine(MIDDLE, **numbers)]  # type: ignore[arg-type]
            yield Case(
                f"affine {number + 1}, {name}",
                "Pillow",
                "affine",
                [values, name, FILL],
                op(Op.AFFINE, *values, 0, 0, reading, *FILL),
            )


def middle_of(number: int, count: int) -> float:
    """Returns a random number that chooses this one of so many."""
    return (number + 0.5) / count


def of_policies() -> Iterator[Case]:
    """One manipulation at a time, with either sign."""
    names = ("Identity", *_SPACE)
    for number, name in enumerate(names):
        which = middle_of(number, len(names))
        for magnitude, sign in ((3, 0.2), (9, 0.8), (20, 0.2), (30, 0.8)):
            yield Case(
                f"{name} at {magnitude} of 31, sign {'-' if sign <= 0.5 else '+'}",
                "RandAugment",
                name,
                [31, magnitude, sign <= 0.5, "nearest"],
                given(RandAugment(1, magnitude), lambda purpose, count, which=which, sign=sign: [which, sign]),
            )
        for bin_, sign in ((5, 0.8), (17, 0.2), (30, 0.8)):
            drawn = (which, middle_of(bin_, 31), sign)
            yield Case(
                f"{name} at {bin_} of 31, sign {'-' if sign <= 0.5 else '+'}",
                "TrivialAugmentWide",
                name,
                [31, bin_, sign <= 0.5, "nearest"],
                given(
                    TrivialAugmentWide(),
                    lambda purpose, count, drawn=drawn: drawn,
                ),
            )
    for policy in _LEARNED:
        for pair in range(25):
            for sign in (0.2, 0.8):
                drawn = (middle_of(pair, 25), 0.0, sign, 0.0, 1 - sign)
                yield Case(
                    f"{policy}, pair {pair + 1}, sign {'-' if sign <= 0.5 else '+'}",
                    "AutoAugment",
                    policy,
                    [pair, sign <= 0.5],
                    given(AutoAugment(policy), lambda purpose, count, drawn=drawn: drawn),  # type: ignore[arg-type]
                )


def of_timm() -> Iterator[Case]:
    for number, name in enumerate(TimmRandAugment.names):
        for level, sign in ((2, 0.8), (7, 0.2), (9, 0.8), (10, 0.2)):
            for increasing in (0, 1):
                for reading, share in (("bilinear", 0.2), ("bicubic", 0.8)):
                    warps = name in ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")
                    if reading == "bilinear" and not warps:
                        continue
                    drawn = (middle_of(number, len(TimmRandAugment.names)), 0.0, sign, share, 0.5)
                    how = f"{', inc' if increasing else ''}{', ' + reading if warps else ''}"
                    yield Case(
                        f"{name} at {level}, sign {'-' if sign > 0.5 else '+'}{how}",
                        "timm",
                        name,
                        [level, sign, bool(increasing), reading],
                        given(
                            TimmRandAugment(f"rand-m{level}-n1-p1-inc{increasing}", fill=tuple(map(int, FILL))),
                            lambda purpose, count, drawn=drawn: drawn,
                        ),
                    )


def pictures_of(folder: Path, count: int) -> NDArray[np.uint8]:
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpeg", ".jpg", ".png"))
    chosen = paths[:: max(len(paths) // count, 1)][:count]
    if not chosen:
        raise SystemExit(f"there are no JPEG or PNG pictures in {folder}")
    return np.stack([np.array(Image.open(path).convert("RGB").resize((WIDTH, HEIGHT))) for path in chosen])


def psnr(found: NDArray[np.uint8], expected: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Returns a number for each picture."""
    errors = ((found.astype(np.float64) - expected) ** 2).mean(axis=(1, 2, 3))
    with np.errstate(divide="ignore"):
        return 10 * np.log10(255**2 / errors)


def text_of(decibels: float) -> str:
    return "same" if np.isinf(decibels) else f"{decibels:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, help="a folder of pictures")
    parser.add_argument("--pictures", type=int, default=24, help="that are taken of it (%(default)s)")
    parser.add_argument("--least", type=float, help="end with an error if a PSNR is below this, of any but Pillow's")
    help_text = "of an environment that has torchvision; by default the one that runs this"
    parser.add_argument("--torchvision-python", metavar="PATH", default=sys.executable, help=help_text)
    options = parser.parse_args()
    images = pictures_of(options.images, options.pictures)
    tensors = torch.from_numpy(images).permute(0, 3, 1, 2)
    batch = Batch(tensors, Draws(0, 0, np.arange(len(images))), np.tile([HEIGHT, WIDTH], (len(images), 1)))
    print(f"{describe_machine()}; {len(images)} pictures of {HEIGHT} x {WIDTH}")
    worst_of: dict[str, tuple[float, str]] = {}
    with TemporaryDirectory() as folder:
        source, result = Path(folder, "source.npy"), Path(folder, "result.npy")
        np.save(source, images)
        peer = subprocess.Popen(
            [options.torchvision_python, str(PEER), str(source), str(result)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert peer.stdin is not None
        assert peer.stdout is not None
        versions = peer.stdout.readline().strip()
        if not versions:
            peer.communicate()
            parser.exit(2, f"torchvision cannot be used in the environment of {options.torchvision_python}\n")
        print(versions)
        for cases in (of_torchvision(), of_pillow(), of_policies(), of_timm()):
            for case in cases:
                print(json.dumps([case.library, case.call, case.arguments]), file=peer.stdin, flush=True)
                answer = peer.stdout.readline().strip()
                if answer != "done":
                    print(f"{case.library:<20}{case.title:<50} not compared: {answer}")
                    continue
                expected = np.load(result)
                found = case.ours(batch).finished().images.permute(0, 2, 3, 1).numpy()
                decibels = psnr(found, expected)
                largest = np.abs(found.astype(int) - expected).max()
                print(
                    f"{case.library:<20}{case.title:<50}{text_of(decibels.min()):>8}"
                    f"{text_of(float(np.median(decibels))):>8}{largest:>6}",
                    flush=True,
                )
                worst_of[case.library] = min(worst_of.get(case.library, (np.inf, "")), (decibels.min(), case.title))
        peer.communicate()
    for library, (decibels, title) in worst_of.items():
        print(f"{library}: worst {text_of(decibels)}{'' if np.isinf(decibels) else f', {title}'}")
    if options.least is not None and any(
        decibels < options.least for library, (decibels, _) in worst_of.items() if library != "Pillow"
    ):
        sys.exit(1)


if __name__ == "__main__":
    main()
