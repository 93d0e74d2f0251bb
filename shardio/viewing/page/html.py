"""HTML that is put together of elements. Whatever is no element is text, and is escaped."""

from __future__ import annotations

import html
from typing import TypeAlias

from shardio.errors import printable


class Html(str):
    """Text that is HTML."""

    __slots__ = ()


Child: TypeAlias = str | int | float
_EMPTY = frozenset({"meta", "img", "input", "br"})


def tag(name: str, /, *children: Child, **attributes: Child | None) -> Html:
    """Returns an element. `class_` is the attribute `class`, and `aria_label` is `aria-label`; None leaves one out."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{told}>" if name in _EMPTY else f"<{name}{told}>{joined(*children)}</{name}>")


def joined(*children: Child) -> Html:
    return Html("".join(child if isinstance(child, Html) else escaped(child) for child in children))


def escaped(value: Child) -> Html:
    return Html(html.escape(printable(str(value))))


def shortened(text: str, most: int = 120) -> str:
    """Returns a text that a person can read at once: visible characters, and dots for the middle of a long one."""
    text = printable(text if len(text) <= 8 * most else text[: 4 * most] + text[-4 * most :])
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-(most // 2) :]}"


def foreign(text: str, most: int = 120) -> Html:
    """Returns a text of others, whose direction of writing is its own."""
    return tag("bdi", shortened(text, most))
