"""Checks arguments. Errors name the argument, the expected values, and the value found.

A transform names the check of an argument in its annotation, as in `p: Probability = 0.5`. `Configuration` calls it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Annotated, Any, TypeVar

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


def check_not_negative(name: str, value: float) -> None:
    check_number(name, value)
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0; found {value!r}")


def check_probability(name: str, value: float) -> None:
    check_number(name, value)
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be from 0 to 1; found {value!r}")


def check_whole(name: str, value: object, least: int, most: float = math.inf) -> None:
    """Raises ValueError unless `value` is an integer from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        bounds = f"{least} or more" if most == math.inf else f"from {least} to {most:.0f}"
        raise ValueError(f"{name} must be an integer, {bounds}; found {value!r}")


def as_pair(value: T | tuple[T, T]) -> tuple[T, T]:
    """Returns `value` itself if it is a sequence, otherwise the pair (value, value). Checks nothing."""
    return value if isinstance(value, Sequence) else (value, value)  # type: ignore[return-value]


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
        limits = [f"{'above' if above else 'at least'} {least:g}"] * math.isfinite(least)
        limits += [f"at most {most:g}"] * math.isfinite(most)
        expected = f"(min, max) with min <= max, both {' and '.join(limits) or 'finite'}"
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
    check_number(name, value)
    if not 0 <= value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{name} must be a number of at least 0, or (min, max); found {value!r}")
    if center + value > most:  # type: ignore[operator]
        raise ValueError(f"{name} must be a number from 0 to {most - center:g}, or (min, max); found {value!r}")
    return max(center - value, least), center + value  # type: ignore[operator]


def check_fill(name: str, fill: float | Sequence[float] | None) -> None:
    """Raises TypeError or ValueError unless `fill` is a gray level, a sequence of gray levels, or None."""
    if isinstance(fill, str) or (isinstance(fill, Sequence) and not fill):
        raise ValueError(f"{name} must be a gray level, or a gray level per channel; found {fill!r}")
    for level in () if fill is None else fill if isinstance(fill, Sequence) else (fill,):
        check_number(name, level)
        if not 0 <= level <= 255:
            raise ValueError(f"{name} must be from 0 to 255; found {fill!r}")


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


def positive_range(most: float = math.inf) -> Callable[[str, Any], object]:
    return lambda name, value: check_range(name, value, 0, most, above=True)


Probability = Annotated[float, check_probability]
NotNegative = Annotated[float, check_not_negative]
Fill = Annotated[float | Sequence[float] | None, check_fill]
Angles = Annotated[float | tuple[float, float], lambda name, value: around(name, value, 0)]
