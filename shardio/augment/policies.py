"""Policies: random operations at random magnitudes, drawn for each image. RandAugment, TrivialAugment and others.

Operations, magnitudes and their distributions match torchvision's classes of the same names; TimmRandAugment matches
the RandAugment that timm's configurations name.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardio.augment.arguments import Color, Fill, check_whole, fill_of
from shardio.augment.batch import Batch
from shardio.augment.chain import Transform
from shardio.augment.geometry import SAMPLINGS, Reading, affine
from shardio.augment.steps import FILL_AT, SAMPLING_AT, WARPS, Op, Sampling

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]

Values = Callable[[Floats, tuple[int, int]], Sequence[ArrayLike]]
"""A function that returns the values of an Op, from magnitudes, (n,), and the image's (height, width)."""


class _Operation(NamedTuple):
    op: Op
    values: Values = lambda magnitudes, size: ()


# By the names of papers and libraries. Magnitudes are in the operation's own unit: a slope, pixels, degrees, bits;
# those of factors are the difference to 1.
_OPERATIONS: dict[str, _Operation] = {
    "Identity": _Operation(Op.NOTHING),
    "ShearX": _Operation(Op.AFFINE, lambda m, size: (1, m, 0, 0, 1, 0)),
    "ShearY": _Operation(Op.AFFINE, lambda m, size: (1, 0, 0, m, 1, 0)),
    "TranslateX": _Operation(Op.AFFINE, lambda m, size: (1, 0, -m, 0, 1, 0)),
    "TranslateY": _Operation(Op.AFFINE, lambda m, size: (1, 0, 0, 0, 1, -m)),
    "Rotate": _Operation(Op.AFFINE, lambda m, size: affine((size[1] / 2, size[0] / 2), -m)),
    "Brightness": _Operation(Op.BRIGHTNESS, lambda m, size: (1 + m,)),
    "Color": _Operation(Op.SATURATION, lambda m, size: (1 + m,)),
    "Contrast": _Operation(Op.CONTRAST, lambda m, size: (1 + m,)),
    "Sharpness": _Operation(Op.SHARPNESS, lambda m, size: (1 + m,)),
    "Posterize": _Operation(Op.POSTERIZE, lambda m, size: (m,)),
    "Solarize": _Operation(Op.SOLARIZE, lambda m, size: (m,)),
    "SolarizeAdd": _Operation(Op.SOLARIZE_ADD, lambda m, size: (m, 128.0)),
    "AutoContrast": _Operation(Op.AUTOCONTRAST),
    "Equalize": _Operation(Op.EQUALIZE),
    "Invert": _Operation(Op.INVERT),
}

_COLORS = ("Brightness", "Color", "Contrast", "Sharpness")
_SIGNED = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", *_COLORS)
_SPACE = (*_SIGNED, "Posterize", "Solarize", "AutoContrast", "Equalize")


def _bins(
    count: int,
    size: tuple[int, int],
    shear: float = 0.3,
    translate: float | None = None,
    rotate: float = 30.0,
    factor: float = 0.9,
    bits: int = 4,
) -> dict[str, Floats]:
    """Returns the magnitudes, (count,), of each operation that has magnitudes, by name, from no change to the maximum.

    `size` is the image's height and width. The other arguments are the strongest changes: a slope, pixels (None is
    150 / 331 of the size), degrees, the difference of a factor to 1, and the fewest bits that Posterize keeps.
    """
    down, right = (translate or 150 / 331 * side for side in size)
    up = np.linspace(0.0, 1.0, count)
    return {
        "ShearX": shear * up,
        "ShearY": shear * up,
        "TranslateX": np.trunc(np.linspace(0, right, count, dtype=np.float32)).astype(np.float64),
        "TranslateY": np.trunc(np.linspace(0, down, count, dtype=np.float32)).astype(np.float64),
        "Rotate": rotate * up,
        **dict.fromkeys(_COLORS, factor * up),
        "Posterize": np.rint(8 - np.arange(count) / ((count - 1) / (8 - bits))),
        # Divided last: a threshold that is a whole gray level must be so exactly.
        "Solarize": 255 * np.arange(count)[::-1] / (count - 1),
    }


def _number(share: Floats, count: int) -> Numbers:
    """Returns random integers from 0 to `count` - 1, made of `share`, random numbers from [0, 1)."""
    return (share * count).astype(np.int64)


class _Choice(NamedTuple):
    """One operation per image, (B,) each: its number in the policy's `names`, its magnitude, whether it applies, and
    the Sampling by which a warp reads pixels (None: the policy's `interpolation`)."""

    chosen: Numbers
    magnitudes: Floats
    applied: NDArray[np.bool_] | bool = True
    readings: ArrayLike | None = None  # a Sampling, or (B,); None: the policy's `interpolation`


class _Policy(Transform):
    """Applies random operations of `names`, one after the other: the base class of all policies."""

    records = True
    names: ClassVar[tuple[str, ...]] = ("Identity", *_SPACE)
    interpolation: str
    fill: Fill

    @abstractmethod
    def _draws(self, batch: Batch, purpose: str) -> Iterator[_Choice]:
        """Yields the operations to apply, in order. Each item holds an operation for every image."""

    def _at_bins(self, space: dict[str, Floats], chosen: Numbers, bins: Numbers | int, sign: Floats) -> _Choice:
        """Returns an operation for each image, with the magnitude at index `bins` among its magnitudes in `space`.

        `chosen`, (B,), are the operations' numbers in `names`; `bins` is an index for all images, or (B,). `space` is
        from `_bins`. `sign`, (B,), is from [0, 1): up to 1/2, a magnitude that can have a sign becomes negative.
        """
        table = np.stack([space.get(name, np.zeros_like(space["Rotate"])) for name in self.names])
        has_sign = np.array([name in _SIGNED for name in self.names])[chosen]
        return _Choice(chosen, table[chosen, bins] * np.where(has_sign & (sign <= 0.5), -1, 1))

    def apply(self, batch: Batch, purpose: str) -> Batch:
        batch = batch.unsquashed()
        batch.check_channels(_OPERATIONS[name].op for name in self.names)
        channels = batch.images.shape[1]
        color = np.array(fill_of(self.fill, channels))[:, None]
        for drawn in self._draws(batch, purpose):
            applied = np.broadcast_to(drawn.applied, len(batch))
            readings = SAMPLINGS[self.interpolation] if drawn.readings is None else drawn.readings
            codes = np.zeros(len(batch), np.uint8)
            values = np.zeros((FILL_AT + channels, len(batch)))
            for number in np.unique(drawn.chosen[applied]):
                op, values_at = _OPERATIONS[self.names[number]]
                mine = applied & (drawn.chosen == number)
                codes[mine] = op
                for place, value in enumerate(values_at(drawn.magnitudes[mine], batch.size)):
                    values[place, mine] = value
                if op in WARPS:
                    values[SAMPLING_AT, mine] = np.broadcast_to(readings, len(batch))[mine]
                    values[FILL_AT:, mine] = color
            batch = batch.stepped(codes, *values)
        return batch


@dataclass(frozen=True, repr=False)
class RandAugment(_Policy):
    """Applies `num_ops` random operations to each image, with `magnitude` from 0 to `num_magnitude_bins` - 1.

    Cubuk, Zoph, Shlens, Le, "RandAugment: Practical automated data augmentation with a reduced search space", 2020.
    """

    num_ops: Annotated[int, partial(check_whole, low=0)] = 2
    magnitude: int = 9
    num_magnitude_bins: Annotated[int, partial(check_whole, low=2)] = 31
    interpolation: Reading = "nearest"
    fill: Fill = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("magnitude", self.magnitude, 0, self.num_magnitude_bins - 1)

    def _draws(self, batch: Batch, purpose: str) -> Iterator[_Choice]:
        for number in range(self.num_ops):
            which, sign = batch.draws.uniform(f"{purpose}/{number}", 2)
            chosen = _number(which, len(self.names))
            yield self._at_bins(_bins(self.num_magnitude_bins, batch.size), chosen, self.magnitude, sign)


@dataclass(frozen=True, repr=False)
class TrivialAugmentWide(_Policy):
    """Applies one random operation to each image, with a random magnitude from 0 to `num_magnitude_bins` - 1.

    Müller, Hutter, "TrivialAugment: Tuning-free yet state-of-the-art data augmentation", ICCV 2021.
    """

    num_magnitude_bins: Annotated[int, partial(check_whole, low=2)] = 31
    interpolation: Reading = "nearest"
    fill: Fill = None

    def _draws(self, batch: Batch, purpose: str) -> Iterator[_Choice]:
        which, share, sign = batch.draws.uniform(purpose, 3)
        chosen, bins = _number(which, len(self.names)), _number(share, self.num_magnitude_bins)
        space = _bins(self.num_magnitude_bins, batch.size, 0.99, 32.0, 135.0, 0.99, 2)
        yield self._at_bins(space, chosen, bins, sign)


# The appendix of the paper: subpolicies, each of two operations with probability in tenths and magnitude, of 10 bins.
_LEARNED = {
    "imagenet": (
        "Posterize 4 8, Rotate 6 9; Solarize 6 5, AutoContrast 6 0; Equalize 8 0, Equalize 6 0; "
        "Posterize 6 7, Posterize 6 6; Equalize 4 0, Solarize 2 4; Equalize 4 0, Rotate 8 8; "
        "Solarize 6 3, Equalize 6 0; Posterize 8 5, Equalize 10 0; Rotate 2 3, Solarize 6 8; "
        "Equalize 6 0, Posterize 4 6; Rotate 8 8, Color 4 0; Rotate 4 9, Equalize 6 0; "
        "Equalize 0 0, Equalize 8 0; Invert 6 0, Equalize 10 0; Color 6 4, Contrast 10 8; "
        "Rotate 8 8, Color 10 2; Color 8 8, Solarize 8 7; Sharpness 4 7, Invert 6 0; "
        "ShearX 6 5, Equalize 10 0; Color 4 0, Equalize 6 0; Equalize 4 0, Solarize 2 4; "
        "Solarize 6 5, AutoContrast 6 0; Invert 6 0, Equalize 10 0; Color 6 4, Contrast 10 8; "
        "Equalize 8 0, Equalize 6 0"
    ),
    "cifar10": (
        "Invert 1 0, Contrast 2 6; Rotate 7 2, TranslateX 3 9; Sharpness 8 1, Sharpness 9 3; "
        "ShearY 5 8, TranslateY 7 9; AutoContrast 5 0, Equalize 9 0; ShearY 2 7, Posterize 3 7; "
        "Color 4 3, Brightness 6 7; Sharpness 3 9, Brightness 7 9; Equalize 6 0, Equalize 5 0; "
        "Contrast 6 7, Sharpness 6 5; Color 7 7, TranslateX 5 8; Equalize 3 0, AutoContrast 4 0; "
        "TranslateY 4 3, Sharpness 2 6; Brightness 9 6, Color 2 8; Solarize 5 2, Invert 0 0; "
        "Equalize 2 0, AutoContrast 6 0; Equalize 2 0, Equalize 6 0; Color 9 9, Equalize 6 0; "
        "AutoContrast 8 0, Solarize 2 8; Brightness 1 3, Color 7 0; Solarize 4 5, AutoContrast 9 0; "
        "TranslateY 9 9, TranslateY 7 9; AutoContrast 9 0, Solarize 8 3; Equalize 8 0, Invert 1 0; "
        "TranslateY 7 9, AutoContrast 9 0"
    ),
    "svhn": (
        "ShearX 9 4, Invert 2 0; ShearY 9 8, Invert 7 0; Equalize 6 0, Solarize 6 6; Invert 9 0, Equalize 6 0; "
        "Equalize 6 0, Rotate 9 3; ShearX 9 4, AutoContrast 8 0; ShearY 9 8, Invert 4 0; ShearY 9 5, Solarize 2 6; "
        "Invert 9 0, AutoContrast 8 0; Equalize 6 0, Rotate 9 3; ShearX 9 4, Solarize 3 3; ShearY 8 8, Invert 7 0; "
        "Equalize 9 0, TranslateY 6 6; Invert 9 0, Equalize 6 0; Contrast 3 3, Rotate 8 4; "
        "Invert 8 0, TranslateY 0 2; ShearY 7 6, Solarize 4 8; Invert 6 0, Rotate 8 4; ShearY 3 7, TranslateX 9 3; "
        "ShearX 1 6, Invert 6 0; Solarize 7 2, TranslateY 6 7; ShearY 8 4, Invert 8 0; ShearX 7 9, TranslateY 8 3; "
        "ShearY 8 5, AutoContrast 7 0; ShearX 7 2, Invert 1 0"
    ),
}


@dataclass(frozen=True, repr=False)
class AutoAugment(_Policy):
    """Applies a random one of 25 pairs of operations to each image. The pairs were learned for the dataset `policy`.

    Cubuk, Zoph, Mane, Vasudevan, Le, "AutoAugment: Learning augmentation strategies from data", CVPR 2019.
    """

    policy: Literal["imagenet", "cifar10", "svhn"] = "imagenet"
    interpolation: Reading = "nearest"
    fill: Fill = None

    names = ("Invert", *_SPACE)

    def _draws(self, batch: Batch, purpose: str) -> Iterator[_Choice]:
        pairs = [[part.split() for part in pair.split(",")] for pair in _LEARNED[self.policy].split(";")]
        numbers = batch.draws.uniform(purpose, 5)
        pair = _number(numbers[0], len(pairs))
        for place, (whether, sign) in enumerate((numbers[1:3], numbers[3:5])):
            chosen = np.array([self.names.index(parts[place][0]) for parts in pairs])[pair]
            p, bins = (np.array([int(parts[place][at]) for parts in pairs])[pair] for at in (1, 2))
            yield self._at_bins(_bins(10, batch.size), chosen, bins, sign)._replace(applied=whether * 10 < p)


@dataclass(frozen=True, repr=False)
class TimmRandAugment(_Policy):
    """Applies the RandAugment of a timm configuration.

    `config` is "rand" and parts joined by hyphens, such as "rand-m9-mstd0.5-inc1" (defaults in parentheses):

    - `m`: the level, 0 to 10 (10). `mstd`: the standard deviation of its noise (0); above 100, levels are uniform from
      0 to `m`. `mmax`: the maximum level (10). `n`: the number of operations (2). `p`: the probability of each (0.5).
    - `inc1`: a higher level always changes the image more. `t`, another set of operations, is not supported.

    `interpolation` is a filter of Pillow, or "random" to draw a filter for each image. `fill` is the color outside of
    the image; timm's training script passes the mean of the dataset.
    """

    config: str = "rand-m9-mstd0.5-inc1"
    interpolation: Literal["random", "bilinear", "bicubic"] = "random"
    fill: Color = (124, 116, 104)

    # What timm calls its default set, whose magnitudes are shares of the maximum at level 10.
    names = (
        *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd", "Color", "Contrast"),
        *("Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._parts

    @cached_property
    def _parts(self) -> dict[str, float]:
        first, *parts = self.config.split("-") if isinstance(self.config, str) else [""]
        values = {"m": 10.0, "mstd": 0.0, "mmax": 10.0, "n": 2.0, "p": 0.5, "inc": 0.0}
        for part in parts:
            found = re.fullmatch(r"(m|mstd|mmax|n|p|inc)(\d+(?:\.\d*)?|inf)", part)
            if found is None:
                first = ""
            else:
                values[found[1]] = float(found[2])
        whole = all(values[name].is_integer() for name in ("m", "mmax", "n", "inc"))
        if first != "rand" or not whole or values["p"] > 1 or values["inc"] > 1:
            raise ValueError(
                'config must be "rand" and parts like m9, mstd0.5, mmax10, n2, p0.5 or inc1, joined by hyphens; found '
                f"{self.config!r}"
            )
        return values

    def _draws(self, batch: Batch, purpose: str) -> Iterator[_Choice]:
        parts = self._parts
        for number in range(int(parts["n"])):
            which, whether, sign, reading, share = batch.draws.uniform(f"{purpose}/{number}", 5)
            if parts["mstd"] > 100:
                levels = parts["m"] * share
            else:
                levels = parts["m"] + parts["mstd"] * batch.draws.normal(f"{purpose}/{number} noise", 1)[0]
            levels = np.clip(levels, 0, parts["mmax"])
            chosen = _number(which, len(self.names))
            table = self._magnitudes(levels / 10, np.where(sign > 0.5, -1.0, 1.0), batch.size)
            magnitudes = np.stack([table.get(name, levels) for name in self.names])[chosen, np.arange(len(batch))]
            bilinear, bicubic = Sampling.PILLOW_BILINEAR, Sampling.PILLOW_BICUBIC
            by_chance = np.where(reading < 0.5, bilinear, bicubic)
            readings = {"bilinear": bilinear, "bicubic": bicubic}.get(self.interpolation, by_chance)
            yield _Choice(chosen, magnitudes, whether < parts["p"], readings)

    def _magnitudes(self, shares: Floats, sign: Floats, size: tuple[int, int]) -> dict[str, Floats]:
        """Returns the magnitudes by operation, (B,) each. `shares`, (B,), are levels / 10. `sign`, (B,), is -1 or 1."""
        increasing = bool(self._parts["inc"])
        bits, threshold = np.floor(4 * shares), np.minimum(256, np.floor(256 * shares))
        factor = np.maximum(0.1, 1 + 0.9 * shares * sign) if increasing else 1.8 * shares + 0.1
        height, width = size
        return {
            "Rotate": 30 * shares * sign,
            "Posterize": 4 - bits if increasing else bits,
            "Solarize": 256 - threshold if increasing else threshold,
            "SolarizeAdd": np.minimum(128, np.floor(110 * shares)),
            **dict.fromkeys(_COLORS, factor - 1),
            "ShearX": 0.3 * shares * sign,
            "ShearY": 0.3 * shares * sign,
            "TranslateX": -0.45 * shares * sign * width,
            "TranslateY": -0.45 * shares * sign * height,
        }
