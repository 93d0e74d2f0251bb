"""Amounts as people write them, on the command line and from Python alike: 224x320, 4GiB, 1%, 3/16.

A function that parses a text raises ValueError with what it expected; its caller adds the argument's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from numbers import Integral, Real
from typing import TypeVar

from shardio.system.machine import usable_cores

T = TypeVar("T")

DEFAULT_MAX_BAD = 0.01
"""The share of the images of a conversion that may be refused."""

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}


def parse_nbytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError("a size such as 4GiB, 500MB or 1000000")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    if not match:
        raise ValueError("pixels such as 256, or HEIGHTxWIDTH such as 224x320")
    return int(match[1]), int(match[2] or match[1])


def parse_max_bad(text: str) -> int | float:
    match = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)%", text)
    if not match or (match[2] and float(match[2]) > 100):
        raise ValueError("a number of images such as 10, or a share such as 1%")
    return int(match[1]) if match[1] else float(match[2]) / 100


def parse_part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError("K/N with K from 1 to N, such as 3/16")
    return int(match[1]), int(match[2])


def given(name: str, value: T | str, parse: Callable[[str], T]) -> T:
    """Returns the value of an argument, parsed if it is text. The ValueError names the argument."""
    if not isinstance(value, str):
        return value
    try:
        return parse(value.strip())
    except ValueError as error:
        raise ValueError(f"{name}: expected {error}; found {value!r}") from None


def check_workers(workers: int | None) -> None:
    """Raises ValueError unless it is a number of workers, or None."""
    if workers is None:
        return
    if not isinstance(workers, Integral):
        raise ValueError(f"workers must be an integer, or None for all cores; found {workers!r}")
    if workers < 1:
        raise ValueError(f"workers must be at least 1; found {workers}")


def check_max_bad(max_bad: int | float | str) -> int | float:
    """Returns the count (int) or share (float) of sources that may be refused. Raises ValueError if it is neither."""
    max_bad = given("max_bad", max_bad, parse_max_bad)
    if isinstance(max_bad, bool) or not isinstance(max_bad, Real):
        raise ValueError(f"max_bad must be a count such as 10, or a share such as 0.01 or '1%'; found {max_bad!r}")
    if isinstance(max_bad, Integral):
        if max_bad < 0:
            raise ValueError(f"max_bad must not be negative; found {max_bad}")
        return int(max_bad)
    if not 0 <= max_bad <= 1:
        raise ValueError(f"max_bad as a share must be from 0.0 to 1.0; found {max_bad}")
    return max_bad


def count_workers(workers: int | None) -> int:
    """Returns the number of workers, by default one for each core. Raises ValueError if it is none."""
    check_workers(workers)
    return usable_cores() if workers is None else workers


def most_bad(max_bad: int | float, num_sources: int) -> int:
    """Returns how many of the sources may be refused by a checked `max_bad`."""
    if isinstance(max_bad, int):
        return max_bad
    return int(round(max_bad * num_sources, 6))  # 0.29 * 100 is a little less than 29
