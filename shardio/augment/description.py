"""Describes a transform: as text, as a dictionary that JSON can store, and by the digest of this dictionary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import groupby
from numbers import Real
from typing import Any, Literal, get_origin, get_type_hints

import numpy as np
import torch

from shardio.errors import check_choice

KIND = "transform"
"""The dictionary key of the class name."""

LATER = {"later": True}
"""Metadata of an argument that a later version added. `to_dict` omits it if it is None, so old digests stay valid."""

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Configuration:
    """A dataclass whose arguments are numbers, names, dtypes, other `Configuration`, or lists of them."""

    _classes: dict[str, type[Configuration]] = {}  # noqa: RUF012 - all classes share it

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Configuration._classes[_name_of(cls)] = cls

    def __post_init__(self) -> None:
        """Normalizes the arguments, then checks them as their annotations say.

        Lists and arrays become tuples, and mappings become sorted pairs, so equal arguments compare equal.
        """
        for field in fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, field.name, _kept(getattr(self, field.name)))
        for name, check in _checks_of(type(self)):  # type: ignore[arg-type]
            check(name, getattr(self, name))

    def __repr__(self) -> str:
        """Returns the Python call that creates this, without default arguments.

        Each inner transform has a line, and equal transforms share it.
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
        """Returns a dictionary of the class and the arguments, with values that JSON can store.

        The key "transform" has the name of the class; each argument has its own name as the key. Raises TypeError if
        the class is not a dataclass, or JSON cannot store an argument.
        """
        if not is_dataclass(self):
            raise TypeError(f"cannot describe a transform that is not a dataclass; found {self!r}")
        values = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.metadata != LATER:
                values[field.name] = _plain(value)
        return {KIND: _name_of(type(self)), **values}

    @property
    def digest(self) -> str:
        """The SHA-256 of `to_dict()` in hexadecimal: equal transforms have equal digests."""
        text = json.dumps(_whole(self.to_dict()), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def from_dict(values: Mapping[str, Any]) -> Configuration:
    """Returns the transform that a dictionary from `to_dict` describes.

    Raises ValueError if `values` do not describe a transform.
    """
    kind = values.get(KIND) if isinstance(values, Mapping) else None
    known = Configuration._classes.get(kind) if isinstance(kind, str) else None
    # What has no arguments of its own is a base of other classes.
    if known is None or "__dataclass_fields__" not in vars(known):
        raise ValueError(f'expected a dictionary whose "{KIND}" names a transform class; found {_shown(values)}')
    try:
        return known(**{name: _live(value) for name, value in values.items() if name != KIND})
    except (TypeError, RecursionError) as error:
        raise ValueError(f"expected the arguments of {kind}; found {_shown(values)}: {error}") from None


@cache
def _checks_of(kind: type) -> list[tuple[str, Any]]:
    """Returns pairs of an argument and its check, from the annotations of a class.

    For a class from outside of shardio, the annotations are of its nearest base class in shardio.
    """
    base = next(filter(is_of_shardio, kind.__mro__))
    hints = get_type_hints(base, include_extras=True).items()
    checks = [(name, check) for name, hint in hints for check in getattr(hint, "__metadata__", ())]
    flags = [(name, hint) for name, hint in hints if hint in (bool, bool | None)]
    checks += [(name, lambda name, value, hint=hint: _check_flag(name, value, hint)) for name, hint in flags]
    choices = [(name, hint) for name, hint in hints if get_origin(hint) is Literal]
    return checks + [(name, lambda name, value, hint=hint: check_choice(name, value, hint)) for name, hint in choices]


def _check_flag(name: str, value: object, hint: Any) -> None:
    if not isinstance(value, hint):
        raise TypeError(f"{name} must be True or False; found {value!r}")


def _shown(value: object) -> str:
    try:
        return f"{value!r:.200}"
    except RecursionError:
        return "lists or dictionaries inside each other without end"


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
    raise TypeError(f"arguments of a transform must be numbers, names, dtypes or lists of them; found {value!r}")


def _whole(value: Any) -> Any:
    """Returns the value with whole floats as integers, so 1 and 1.0 have the same digest."""
    if isinstance(value, dict):
        return {name: _whole(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_whole(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _live(value: Any) -> Any:
    if isinstance(value, Mapping):
        return from_dict(value)
    if isinstance(value, list | tuple):
        return tuple(map(_live, value))
    return _DTYPES.get(value, value) if isinstance(value, str) else value
