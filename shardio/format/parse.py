"""Strict parsing of JSON that another program may have written: checks each value of a manifest.

Each function takes a value and `where`, the value's place in the document, and returns the value with its type. Each
error is a FormatError with the place, what was expected and what was found.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import chain
from typing import Any, AnyStr, TypeVar

from shardio.errors import FormatError, show
from shardio.format.layout import MAX_COUNT, is_safe_name

T = TypeVar("T")

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
# os.fsdecode uses other surrogates for bytes of names that are not UTF-8. These stand for nothing.
_SURROGATE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
# The most that Python turns into an integer, and that it writes as JSON, whatever its settings.
_MAX_DIGITS = 4300
_MAX_DEPTH = 100


def document(data: bytes) -> Any:
    """Returns the JSON document in `data`, ASCII bytes.

    Raises FormatError if `data` is invalid, an object repeats a key, or a number is not finite.
    """
    try:
        return json.loads(
            data.decode("ascii"),
            object_pairs_hook=_distinct_keys,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"expected a JSON document in ASCII; the parser found: {error}") from None


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if (repeated := first_repeated(key for key, _ in pairs)) is not None:
        raise FormatError(f"expected distinct keys in each JSON object, found the key {show(repeated)} twice")
    return dict(pairs)


def _no_constant(name: str) -> None:
    raise FormatError(f"expected only finite numbers, found {name}")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise FormatError(f"expected numbers in the range of float64, found {show(text)}")
    return number


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise FormatError(
            f"expected integers of at most {_MAX_DIGITS} digits, found one with {len(text)}: {show(text)}"
        )
    return int(text)


def first_repeated(names: Iterable[AnyStr]) -> AnyStr | None:
    seen: set[AnyStr] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


# --- single values ----------------------------------------------------------------------------------------------------


def fault(where: str, expected: str, found: object) -> FormatError:
    return FormatError(f"{where}: expected {expected}, found {show(found)}")


def checked(where: str, check: Callable[..., T], *values: Any) -> T:
    """Returns check(*values). Turns its ValueError into a FormatError that names the place `where`."""
    try:
        return check(*values)
    except ValueError as error:
        raise FormatError(f"{where}: {error}") from None


def mapping(value: object, where: str) -> dict[str, Any]:
    """Returns the JSON object `value` as a dict, with any keys."""
    if type(value) is not dict:
        raise fault(where, "an object", value)
    return value


def fields(value: object, where: str, keys: Set[str], optional: Set[str] = frozenset()) -> dict[str, Any]:
    """Returns the JSON object `value`, which must have `keys` and may have `optional` keys, as a dict.

    Raises FormatError if it is no object, lacks a key, or has a key that is neither required nor optional.
    """
    found = mapping(value, where)
    if set(found) - optional != keys:
        missing, unknown = sorted(keys - set(found)), sorted(set(found) - keys - optional)
        parts = [f"without {show(missing)}"] if missing else []
        parts += [f"with the unknown {show(unknown)}"] if unknown else []
        raise FormatError(
            f"{where}: expected an object with the keys {sorted(keys)}, found an object {' and '.join(parts)}"
        )
    return found


def sequence(value: object, where: str) -> list[Any]:
    if type(value) is not list:
        raise fault(where, "a list", value)
    return value


def filled(kind: Callable[[object, str], T], value: object, where: str) -> T:
    """Returns kind(value, where), where `kind` is `sequence` or `mapping`. Raises FormatError if it is empty."""
    found = kind(value, where)
    if not found:
        raise fault(where, "at least one value (an optional key without values is left out)", value)
    return found


def strings(value: object, where: str) -> tuple[str, ...]:
    return tuple(string(one, f"{where}[{i}]") for i, one in enumerate(sequence(value, where)))


def count(value: object, where: str, minimum: int = 0) -> int:
    if type(value) is not int or not minimum <= value <= MAX_COUNT:
        raise fault(where, f"an integer from {minimum} to 2**53", value)
    return value


def string(value: object, where: str) -> str:
    if type(value) is not str:
        raise fault(where, "a string", value)
    if _SURROGATE.search(value):
        raise fault(where, "valid Unicode text, or bytes as lone surrogates U+DC80 to U+DCFF", value)
    return value


def name(value: object, where: str) -> str:
    if type(value) is not str or not is_safe_name(value):
        raise fault(where, "a name that matches [A-Za-z0-9][A-Za-z0-9._-]*, at most 200 characters", value)
    return value


def sha256(value: object, where: str) -> str:
    if type(value) is not str or not _SHA256.fullmatch(value):
        raise fault(where, "64 lower-case hexadecimal digits", value)
    return value


def anything(value: object, where: str, depth: int = 0) -> None:
    """Raises FormatError if `value`, any JSON value, is nested too deep or has text that `string` refuses."""
    if isinstance(value, str):
        string(value, where)
    if isinstance(value, (dict, list)):
        if depth == _MAX_DEPTH:
            raise FormatError(
                f"{where}: expected at most {_MAX_DEPTH} levels of objects and lists inside each other, found more"
            )
        for child in chain(value, value.values()) if isinstance(value, dict) else value:
            anything(child, where, depth + 1)


def is_digest(text: str) -> bool:
    """Returns whether `text` is a complete digest: 64 lower-case hexadecimal digits."""
    return _SHA256.fullmatch(text) is not None


def check_text(names: Sequence[object], where: str) -> None:
    """Raises TypeError or ValueError unless all `names` are strings that a manifest may hold.

    `where` names the argument in the message.
    """
    for one in names:
        if not isinstance(one, str):
            raise TypeError(f"{where} must be strings, found {show(one)}")
        if _SURROGATE.search(one):
            raise ValueError(
                f"{where} must be valid Unicode (or have lone surrogates U+DC80 to U+DCFF for bytes), found {show(one)}"
            )
