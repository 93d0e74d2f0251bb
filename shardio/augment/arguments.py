"""Configuration, the base class of transforms: checks and prints arguments, and converts a transform to a dictionary.

The annotation of an argument has the argument's check, as in `p: Probability = 0.5`. `Configuration` calls the check,
except for None if the annotation allows None. Errors name the argument, the expected values, and the value found.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from itertools import groupby
from numbers import Real
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import torch

from shardio.errors import check_choice, show

T = TypeVar("T")

KIND = "transform"
"""The key of `to_dict` that has the name of the class."""

LATER = {"later": True}
"""Metadata of fields that a later version added. `to_dict` omits them if they are None, so old digests stay valid."""

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Configuration:
    """The base class of transforms: a dataclass whose arguments are numbers, strings, dtypes, transforms, or lists."""

    _classes: dict[str, type[Configuration]] = {}  # noqa: RUF012 - all classes share it

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Configuration._classes[_name_of(cls)] = cls

    def __post_init__(self) -> None:
        """Converts lists and arrays to tuples, then calls the checks in the annotations of the arguments.

        Mappings become sorted tuples of pairs, so equal arguments compare equal. Raises the errors of the checks.
        """
        for field in fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, field.name, _kept(getattr(self, field.name)))
        for name, check, is_optional in _checks_of(type(self)):  # type: ignore[arg-type]
            value = getattr(self, name)
            if value is not None or not is_optional:
                check(name, value)

    def __repr__(self) -> str:
        """Returns the Python code that creates the transform, without arguments that have their default value.

        Each inner transform is on a line of its own; several equal ones are on one line, as `*[HorizontalFlip()] * 2`.
        """
        if not is_dataclass(self):
            return object.__repr__(self)
        arguments = []
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple) and value and all(isinstance(part, Configuration) for part in value):
                lines = ""
                for part, several in groupby(value):
                    count = len([*several])
                    text = repr(part) if count == 1 else f"*[{part!r}] * {count}"
                    lines += f"    {text},\n".replace("\n", "\n    ")[:-4]
                arguments.append(f"[\n{lines}]")
            elif field.default is MISSING or value != field.default:
                arguments.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"

    def to_dict(self) -> dict[str, Any]:
        """Returns the transform as a dictionary that JSON can store and `from_dict` can read.

        The key "transform" has the name of the class, and each argument has its own name as the key. Raises TypeError
        if the class is not a dataclass, or JSON cannot store an argument.
        """
        if not is_dataclass(self):
            raise TypeError(f"to_dict needs a dataclass; found {self!r}: decorate its class with dataclass")
        values = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.metadata != LATER:
                values[field.name] = _plain(value)
        return {KIND: _name_of(type(self)), **values}

    @property
    def digest(self) -> str:
        """The SHA-256 of `to_dict()` in hexadecimal: equal transforms have equal digests."""
        plain = json.loads(json.dumps(self.to_dict()), parse_float=_whole)
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def from_dict(values: Mapping[str, Any]) -> Configuration:
    """Returns the transform that a dictionary from `to_dict` describes.

    Raises ValueError if `values` do not describe a transform.
    """
    kind = values.get(KIND) if isinstance(values, Mapping) else None
    known = Configuration._classes.get(kind) if isinstance(kind, str) else None
    # A class without arguments of its own is the base of other classes.
    if known is None or "__dataclass_fields__" not in vars(known):
        raise ValueError(
            f'expected a dictionary whose "{KIND}" names a transform class; found {show(values)}: import the module '
            "of a class of your own first"
        )
    try:
        return known(**{name: _live(value) for name, value in values.items() if name != KIND})
    except (TypeError, RecursionError) as error:
        raise ValueError(f"expected a dictionary of arguments of {kind}; found {show(values)}: {error}") from None


@cache
def _checks_of(kind: type) -> list[tuple[str, Callable[[str, Any], object], bool]]:
    """Returns (name, check, whether None is allowed) for each argument whose annotation has a check.

    A class from outside of shardio has the checks of its nearest base class in shardio.
    """
    base = next(filter(is_of_shardio, kind.__mro__))
    checks: list[tuple[str, Callable[[str, Any], object], bool]] = []
    for name, hint in get_type_hints(base, include_extras=True).items():
        parts = get_args(hint)
        checks += [
            (name, check, NoneType in parts) for part in (hint, *parts) for check in getattr(part, "__metadata__", ())
        ]
        if hint in (bool, bool | None):
            checks.append((name, partial(_check_flag, hint=hint), False))
        elif get_origin(hint) is Literal:
            checks.append((name, partial(check_choice, choices=hint), False))
    return checks


def _check_flag(name: str, value: object, hint: Any) -> None:
    if not isinstance(value, hint):
        raise TypeError(f"{name} must be True or False; found {value!r}")


def _name_of(kind: type) -> str:
    """Returns the name of a class; for a class from outside of shardio, "module:name"."""
    return kind.__name__ if is_of_shardio(kind) else f"{kind.__module__}:{kind.__qualname__}"


def is_of_shardio(kind: type) -> bool:
    return kind.__module__.startswith("shardio.")


def _kept(value: object) -> object:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        value = sorted(value.items())
    return tuple(map(_kept, value)) if isinstance(value, list | tuple) else value


def _plain(value: object) -> Any:
    if isinstance(value, Configuration):
        return value.to_dict()
    if isinstance(value, str | bool | int | None):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(part) for part in value]
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"arguments of a transform must be numbers, strings, dtypes or lists of these; found {value!r}")


def _whole(text: str) -> float:
    """Returns the number in a text, as an integer if it is one, so 1 and 1.0 have the same digest."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _live(value: Any) -> Any:
    if isinstance(value, Mapping):
        return from_dict(value)
    if isinstance(value, list | tuple):
        return tuple(map(_live, value))
    return _DTYPES.get(value, value) if isinstance(value, str) else value


# --- checks -----------------------------------------------------------------------------------------------------------


def check_type(name: str, value: object) -> None:
    """Raises TypeError unless `value` is a number, or a tensor or array without dimensions."""
    if not isinstance(value, Real) and getattr(value, "ndim", None) != 0:
        raise TypeError(f"{name} must be a number; found {value!r}")


def check_number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    """Raises TypeError or ValueError unless `value` is a finite number from `low` to `high`."""
    check_type(name, value)
    largest = sys.float_info.max
    if not max(low, -largest) <= value <= min(high, largest):
        raise ValueError(f"{name} must be {_bounded('a finite number', low, high)}; found {value!r:.200}")


def numbers_of(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> tuple[float, ...]:
    """Returns `value`, a number or a sequence of numbers, as a tuple of floats.

    Raises ValueError if the sequence is empty, and the errors of `check_number` for each number.
    """
    numbers = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    for number in numbers:
        check_number(name, number, low, high)
    if not numbers:
        raise ValueError(f"{name} must have one or more numbers; found {value!r}")
    return tuple(map(float, numbers))


def _bounded(what: str, low: float, high: float) -> str:
    if high == math.inf:
        return what if low == -math.inf else f"{what}, minimum {low:g}"
    return f"{what} from {low:g} to {high:g}"


def check_whole(name: str, value: object, low: int, high: float = math.inf) -> None:
    """Raises ValueError unless `value` is an integer from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be {_bounded('an integer', low, high)}; found {value!r}")


def as_pair(value: T | tuple[T, T]) -> tuple[T, T]:
    """Returns `value` if it is a sequence, and (value, value) otherwise. Checks nothing."""
    return value if isinstance(value, Sequence) else (value, value)  # type: ignore[return-value]


def check_pair(name: str, value: object) -> None:
    """Raises ValueError unless `value` is a positive integer, or a pair of positive integers."""
    pair = as_pair(value)
    if len(pair) != 2:
        raise ValueError(f"{name} must be one or two integers, minimum 1; found {value!r}")
    for number in pair:
        check_whole(name, number, 1)


def check_range(
    name: str, bounds: object, low: float = -math.inf, high: float = math.inf, *, above: bool = False
) -> tuple[float, float]:
    """Returns `bounds`, (min, max), as floats.

    Raises TypeError or ValueError unless both are finite numbers and `low` <= min <= max <= `high`. With `above`, min
    must also be greater than `low`.
    """
    if not isinstance(bounds, Sequence) or isinstance(bounds, str) or len(bounds) != 2:
        raise ValueError(f"{name} must be (min, max); found {bounds!r}")
    first, last = numbers_of(name, bounds, low, high)
    if first > last or (above and first == low):
        raise ValueError(f"{name} must be (min, max) with {f'{low:g} < ' * above}min <= max; found {bounds!r}")
    return first, last


def around(
    name: str, value: object, center: float, low: float = -math.inf, high: float = math.inf
) -> tuple[float, float]:
    """Returns (min, max): a pair unchanged, or `center` - x and `center` + x for a number x.

    If `center` - x is below `low`, min is `low`. Raises ValueError if x is negative, if `center` + x is above `high`,
    and for a pair that is not in order, or not from `low` to `high`.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        return check_range(name, value, low, high)
    (reach,) = numbers_of(name, value, 0, high - center)
    return max(center - reach, low), center + reach


def fill_of(fill: float | Sequence[float] | None, channels: int, name: str = "fill") -> tuple[float, ...]:
    """Returns the fill value of each channel, a tuple of floats; NaN for each channel if `fill` is None.

    Raises ValueError for a sequence that has neither 1 nor `channels` numbers. `name` is the argument in the error.
    """
    if not isinstance(fill, Sequence):
        return (math.nan if fill is None else float(fill),) * channels
    if len(fill) not in (1, channels):
        raise ValueError(
            f"{name} must be a number, or a number per channel; found {fill!r}, but the images have {channels} channels"
        )
    return tuple(map(float, fill)) * (channels // len(fill))


Probability = Annotated[float, partial(check_number, low=0, high=1)]
Color = Annotated[float | Sequence[float], partial(numbers_of, low=0, high=255)]
Fill = Color | None
PositiveRange = Annotated[tuple[float, float], partial(check_range, low=0, above=True)]
