"""What people call a class: its name in the set, its name for people, or its number."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from shardio.sets.changes.draft import Draft

_NUMBER = re.compile(r"-?[0-9]{1,19}", re.ASCII)


def find_labels(draft: Draft, name: str | int) -> list[int]:
    """Returns the labels that `name` stands for: one, or several if classes have the same name for people; none if the
    set has no such class.

    The name of a class comes first, then its name for people, then its number.
    """
    if isinstance(name, str):
        if name in draft.classes:
            return [draft.classes.index(name)]
        if same := [label for label, other in enumerate(draft.class_names) if other == name]:
            return same
        if not _NUMBER.fullmatch(name):
            return []
    number = int(name)
    is_label = 0 <= number < len(draft.classes) if draft.classes else -(1 << 63) <= number < 1 << 63
    return [number] if is_label else []


def describe_unknown(draft: Draft, name: str | int) -> str:
    """Returns what was expected and what was found where `find_labels` finds nothing."""
    if not draft.classes:
        return f"expected a number, as the set has no classes, found {name!r}"
    close = difflib.get_close_matches(str(name), _distinct([*draft.classes, *draft.class_names]), 3)
    hint = f" (there is {', '.join(map(repr, close))})" if close else ""
    return f"expected a class of the set, or a number from 0 to {len(draft.classes) - 1}, found {name!r}{hint}"


def _distinct(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))
