"""The manipulations that policies choose from: what each does to a picture at a magnitude.

A magnitude is in a manipulation's own unit: a slope, a share, degrees, bits. Torchvision's policies draw it from a list
of bins, timm's compute it from a level of 0 to 10.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardio.augment.batch import Batch
from shardio.augment.checks import Fill, fill_of
from shardio.augment.geometry import Affine
from shardio.augment.steps import FILL_AT, SAMPLING_AT, WARPS, Op

Floats = NDArray[np.float64]
Values = Callable[[Floats, tuple[int, int]], Sequence[ArrayLike]]
"""What an Op takes, from magnitudes, (n,), and the picture's (height, width)."""


@dataclass(frozen=True)
class Manipulation:
    """An operation, and what it takes at a magnitude."""

    op: Op
    values: Values = lambda magnitudes, size: ()


def _rotated(magnitudes: Floats, size: tuple[int, int]) -> Sequence[ArrayLike]:
    return Affine.about((size[1] / 2, size[0] / 2), angle=-magnitudes).values


# By the names that papers and libraries give them. Magnitudes of factors are the difference to 1.
MANIPULATIONS: dict[str, Manipulation] = {
    "Identity": Manipulation(Op.NOTHING),
    "ShearX": Manipulation(Op.AFFINE, lambda m, size: Affine(b=m).values),
    "ShearY": Manipulation(Op.AFFINE, lambda m, size: Affine(d=m).values),
    "TranslateX": Manipulation(Op.AFFINE, lambda m, size: Affine(c=-m).values),
    "TranslateY": Manipulation(Op.AFFINE, lambda m, size: Affine(f=-m).values),
    "Rotate": Manipulation(Op.AFFINE, _rotated),
    "Brightness": Manipulation(Op.BRIGHTNESS, lambda m, size: (1 + m,)),
    "Color": Manipulation(Op.SATURATION, lambda m, size: (1 + m,)),
    "Contrast": Manipulation(Op.CONTRAST, lambda m, size: (1 + m,)),
    "Sharpness": Manipulation(Op.SHARPNESS, lambda m, size: (1 + m,)),
    "Posterize": Manipulation(Op.POSTERIZE, lambda m, size: (m,)),
    "Solarize": Manipulation(Op.SOLARIZE, lambda m, size: (m,)),
    "SolarizeAdd": Manipulation(Op.SOLARIZE_ADD, lambda m, size: (m, 128.0)),
    "AutoContrast": Manipulation(Op.AUTOCONTRAST),
    "Equalize": Manipulation(Op.EQUALIZE),
    "Invert": Manipulation(Op.INVERT),
}


def manipulated(
    batch: Batch,
    names: Sequence[str],
    chosen: NDArray[np.int64],
    magnitudes: Floats,
    applied: NDArray[np.bool_],
    reading: ArrayLike,
    fill: Fill,
) -> Batch:
    """Adds, for each picture that is `applied`, the manipulation of `names` whose number is in `chosen`, (B,).

    `magnitudes` are (B,), `reading` is a Sampling for all pictures or each.
    """
    channels = batch.images.shape[1]
    batch.check_channels(MANIPULATIONS[name].op for name in names)
    colour = fill_of(fill, channels)
    codes = np.zeros(len(batch), np.uint8)
    values = np.zeros((FILL_AT + channels, len(batch)))
    for number in np.unique(chosen[applied]):
        manipulation = MANIPULATIONS[names[number]]
        mine = applied & (chosen == number)
        codes[mine] = manipulation.op
        for place, value in enumerate(manipulation.values(magnitudes[mine], batch.size)):
            values[place, mine] = value
        if manipulation.op in WARPS:
            values[SAMPLING_AT, mine] = np.broadcast_to(reading, len(batch))[mine]
            values[FILL_AT:, mine] = np.array(colour)[:, None]
    return batch.stepped(codes, *values)
