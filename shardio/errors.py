"""The exceptions of shardio. Each is also a subclass of a builtin exception, for code that knows nothing of shardio.

A caller's own mistakes (a wrong type, an index out of range) raise plain builtins. A ShardioError is about files: it
names the file, the expected and the found value, and the way out.

Messages end up in terminals and logs, and contain names, keys and server answers that are not trusted: `printable`
escapes everything that is not plain text. This module also has the other functions that make the text of messages.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Literal, TypeVar, get_args

T = TypeVar("T")

# The longest line of a message. Longer lines repeat another program's value, or a list of thousands of names.
LONGEST_LINE = 1000
# Comparing a name with more names would take seconds.
_MOST_COMPARED = 20_000

Reason = Literal["damaged", "empty", "incomplete", "too large", "unreadable", "unsupported"]
"""The reasons why an image is refused, as in rejects.jsonl; docs/format.md explains each reason."""


def printable(text: str) -> str:
    """Returns `text`, which is not trusted, as one line that is safe in a terminal or a log.

    Every invisible character (newlines and other control characters, marks that change the direction of writing, bytes
    that are not text) becomes an escape as in a Python literal. Backslashes stay, so `printable` may be applied twice.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shortened(text: str, most: int = 120) -> str:
    """Returns `text` as at most `most` printable characters. " ... " replaces the middle of a longer text."""
    text = printable(text if len(text) <= 8 * most else text[: 4 * most] + text[-4 * most :])
    kept = most - 5
    return text if len(text) <= most else f"{text[: kept - kept // 2]} ... {text[len(text) - kept // 2 :]}"


def show(value: object) -> str:
    """Returns the repr of `value`, truncated after 160 characters, for a message."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deep {type(value).__name__}"
    return text[:160] + "..." if len(text) > 160 else text


def check_choice(name: str, value: object, choices: object) -> None:
    """Raises ValueError, which names the argument `name`, unless the Literal `choices` has `value`."""
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(map(str, get_args(choices)))}; found {value!r}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ": did you mean a, b?" with up to three of `known` that are similar to `name`; "" if none is."""
    import difflib

    close = difflib.get_close_matches(name, list(dict.fromkeys(islice(known, _MOST_COMPARED))), 3)
    return f": did you mean {', '.join(close)}?" if close else ""


def bytes_text(count: float) -> str:
    """Returns a number of bytes as text with three digits and a decimal unit, such as "1.23 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def counted(count: int, noun: str) -> str:
    """Returns the count with its noun, in the plural if needed: "1 shard", "1,000 classes"."""
    if count == 1:
        return f"1 {noun}"
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + ("es" if noun.endswith("s") else "s")
    return f"{count:,} {plural}"


def first_of(things: Sequence[T], most: int, text: Callable[[T], str] = str) -> str:
    """Returns the first `most` of `things`, made strings by `text`, and the number of the others: "a, b and 9 more"."""
    more = f" and {len(things) - most:,} more" if len(things) > most else ""
    return ", ".join(map(text, things[:most])) + more


class ShardioError(Exception):
    """Base of every error that shardio raises about the world outside the program.

    Its arguments are the lines of its message. Each line is shortened to at most `LONGEST_LINE` characters.
    """

    def __str__(self) -> str:
        return "\n  ".join(shortened(str(line), LONGEST_LINE) for line in self.args)


class FormatError(ShardioError, ValueError):
    """A file of a shard set is missing or damaged, or does not follow docs/format.md."""


class SetNotFoundError(ShardioError, FileNotFoundError):
    """There is no published shard set (no manifest.json), or it lacks the requested split."""


class SourceError(ShardioError, ValueError):
    """An image collection, or a file of labels, keys or arrays, cannot be used as it is."""


class DecodeError(ShardioError, ValueError):
    """One image was refused. `reason` is one of the values of `Reason`; `detail` explains it in words."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return shortened(f"{self.reason}: {self.detail}", LONGEST_LINE)


class ConvertError(ShardioError, RuntimeError):
    """A set cannot be made or published. A conversion keeps its finished shards."""


class SpaceError(ShardioError, OSError):
    """There is too little space on a filesystem, or too little memory."""


class CacheError(ShardioError, ValueError):
    """A folder cannot be used as a cache of shard sets: it holds something else, or is on a shared filesystem."""


class LaunchError(ShardioError, ValueError):
    """The launcher gives no valid rank and world size, or the ranks of a job do not meet or do not agree."""
