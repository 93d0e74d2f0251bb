"""Checks arguments. Errors name the argument, the expected values, and the value found.

A transform names the check of an argument in its annotation, as in `p: Probability = 0.5`. `Configuration` calls it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Annotated, Any, TypeVar

import torch

T = TypeVar("T")


def check_number(name: str, value: object) -> None:
    """Raises TypeError unless `value` is a number, or a tensor or array without dimensions.

    Raises ValueError for an integer that a float cannot hold.
    """
    if not isinstance(value, Real) and getattr(value, "ndim", None) != 0:
        raise TypeError(f"{name} must be a number; found {value!r}")
    if isinstance(value, int) and value.bit_length() > 1000:
        raise ValueError(
            f"{name} must be a number that a float can hold; found an integer of {value.bit_length()} bits"
        )


def numbers_of(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> tuple[float, ...]:
    """Returns a number, or a sequence of numbers, as a tuple of floats.

    Raises TypeError for other types. Raises ValueError unless all are finite, and from `least` to `most`.
    """
    numbers = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    for number in numbers:
        check_number(name, number)
        if not (least <= number <= most and math.isfinite(number)):
            raise ValueError(f"{name} must be {_bounded('a finite number', least, most)}; found {value!r}")
    if not numbers:
        raise ValueError(f"{name} must be one or more numbers; found {value!r}")
    return tuple(map(float, numbers))


def _bounded(what: str, least: float, most: float) -> str:
    if most == math.inf:
        return what if least == -math.inf else f"{what}, {least:g} or more"
    return f"{what} from {least:g} to {most:g}"


def check_whole(name: str, value: object, least: int, most: float = math.inf) -> None:
    """Raises ValueError unless `value` is an integer from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} must be {_bounded('an integer', least, most)}; found {value!r}")


def as_pair(value: T | tuple[T, T]) -> tuple[T, T]:
    """Returns `value` itself if it is a sequence, otherwise the pair (value, value). Checks nothing."""
    return value if isinstance(value, Sequence) else (value, value)  # type: ignore[return-value]


def check_pair(name: str, value: object) -> None:
    """Raises ValueError unless `value` is a positive integer, or a pair of them."""
    pair = as_pair(value)
    if len(pair) != 2:
        raise ValueError(f"{name} must be an integer, or two integers; found {value!r}")
    for number in pair:
        check_whole(name, number, 1)


def check_range(
    name: str, bounds: object, least: float = -math.inf, most: float = math.inf, *, above: bool = False
) -> tuple[float, float]:
    """Returns `bounds` as floats (low, high).

    Raises TypeError if a bound is not a number, and ValueError unless least <= low <= high <= most and both are finite.
    With `above`, low must be greater than `least`.
    """
    if not isinstance(bounds, Sequence) or isinstance(bounds, str) or len(bounds) != 2:
        raise ValueError(f"{name} must be (min, max); found {bounds!r}")
    low, high = bounds
    check_number(name, low)
    check_number(name, high)
    if not (least < low if above else least <= low) or not low <= high <= most or not math.isfinite(high):
        expected = _bounded(f"(min, max) with {f'{least:g} < ' * above}min <= max, finite numbers", least, most)
        raise ValueError(f"{name} must be {expected}; found {bounds!r}")
    return float(low), float(high)


def around(
    name: str, value: object, center: float, least: float = -math.inf, most: float = math.inf
) -> tuple[float, float]:
    """Returns the bounds (low, high) of an argument: a pair, or a number x that means `center` - x to `center` + x.

    Raises ValueError if a bound is above `most`, or a bound of a pair is below `least`. For a number, a low bound below
    `least` becomes `least`.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        return check_range(name, value, least, most)
    (reach,) = numbers_of(name, value, 0, most - center)
    return max(center - reach, least), center + reach


def check_fill(name: str, fill: float | Sequence[float] | None) -> None:
    """Raises TypeError or ValueError unless `fill` is a gray level, a sequence of gray levels, or None."""
    if fill is not None:
        numbers_of(name, fill, 0, 255)


def fill_of(fill: float | Sequence[float] | None, channels: int, name: str = "fill") -> tuple[float, ...]:
    """Returns `fill` as a tuple with a number for each of `channels`. None becomes NaN.

    Raises ValueError unless `fill` is one number, a number per channel, or None. The error calls it `name`.
    """
    if not isinstance(fill, Sequence):
        return (math.nan if fill is None else float(fill),) * channels
    if len(fill) not in (1, channels):
        raise ValueError(
            f"{name} must be a number, or a number per channel, and the images have {channels} channels; found {fill!r}"
        )
    return tuple(map(float, fill)) * (channels // len(fill))


def whole(least: int, most: float = math.inf) -> Callable[[str, Any], None]:
    return lambda name, value: check_whole(name, value, least, most)


def number(least: float = -math.inf, most: float = math.inf) -> Callable[[str, Any], object]:
    """Returns a check that a value is a finite number from `least` to `most`."""

    def check(name: str, value: object) -> None:
        check_number(name, value)
        numbers_of(name, value, least, most)

    return check


def positive_range(most: float = math.inf) -> Callable[[str, Any], object]:
    return lambda name, value: check_range(name, value, 0, most, above=True)


Probability = Annotated[float, number(0, 1)]
Fill = Annotated[float | Sequence[float] | None, check_fill]

# --- transforms of other libraries -----------------------------------------------------------------------------------

# torchvision and Albumentations are for single images: they draw once per call. Called with a batch, they would crop
# all its images at the same place. Kornia draws for each image, unless told not to.

# The classes of torchvision that draw, besides those whose names begin with "Random".
_DRAWING = {
    "AugMix",
    "AutoAugment",
    "ColorJitter",
    "CutMix",
    "ElasticTransform",
    "GaussianBlur",
    "JPEG",
    "MixUp",
    "RandAugment",
    "ScaleJitter",
    "TrivialAugmentWide",
}
_WAY_OUT = (
    "use transforms of shardio.augment, or shardio.augment.PerSample(transform), which calls a transform for each image"
)
# Containers hand the whole batch to what is inside. What is inside of a user's module is the user's business.
_CONTAINERS = ("torch.nn.modules.container", "torch._dynamo", "torchvision.transforms", "kornia")


def check_foreign(function: object) -> None:
    """Raises ValueError if `function`, or a transform in it, would draw once for all images of a batch.

    Only classes of torchvision, Albumentations and Kornia are recognized. Other functions are the caller's business.
    """
    name = type(function).__name__
    if _is_of(function, "albumentations"):
        raise ValueError(f"transform: {name} takes one image at a time; {_WAY_OUT}")
    if _draws(function):
        raise ValueError(f"transform: {name} draws random numbers once for all images of a batch; {_WAY_OUT}")
    if _is_of(function, "kornia") and getattr(function, "same_on_batch", None):
        raise ValueError(f"transform: {name} draws once for all images of a batch: leave out same_on_batch=True")
    if _is_of(function, *_CONTAINERS):
        for part in _parts_of(function):
            check_foreign(part)


def _draws(function: object) -> bool:
    names = [kind.__name__ for kind in type(function).__mro__ if _is_in(kind, "torchvision.transforms")]
    return any(name in _DRAWING or name.startswith("Random") for name in names)


def of_library(function: object, *names: str) -> bool:
    """Returns whether the class of a function, or of a transform inside it, is defined in the modules `names`."""
    return _is_of(function, *names) or any(of_library(part, *names) for part in _parts_of(function))


def name_of(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _is_of(function: object, *names: str) -> bool:
    return any(_is_in(kind, name) for kind in type(function).__mro__ for name in names)


def _is_in(kind: type, name: str) -> bool:
    return f"{kind.__module__}.".startswith(f"{name}.")


def _parts_of(function: object) -> list[object]:
    parts: list[object] = list(function.children()) if isinstance(function, torch.nn.Module) else []
    several = getattr(function, "transforms", ())
    return [*parts, *several] if isinstance(several, list | tuple) else parts
