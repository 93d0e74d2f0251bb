"""The few exceptions of shardio. Each is also a builtin, so that code that knows nothing of shardio can catch it.

Names, keys and what a server says come from others, and messages end up in terminals and logs: `printable` escapes what
would be more than text there.

A caller's own mistakes (a wrong type, an index out of range) raise plain builtins. A ShardioError speaks of files:
it names the file, what was expected, what was found, and the way out.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Literal

# Of a message. What is longer repeats a value that another program has written, or a list of thousands of names.
LONGEST_LINE = 1000
# Comparing a name with more than these would take seconds.
_MOST_COMPARED = 20_000

Reason = Literal["damaged", "empty", "incomplete", "too large", "unreadable", "unsupported"]
"""Why an image is refused, as rejects.jsonl tells it; docs/format.md says what each means."""


def printable(text: str) -> str:
    """One line of a text that another program or user may have written, as it may go to a terminal or a log.

    Whatever is no visible character (newlines and other control characters, marks that turn the direction of writing,
    bytes that are no text) becomes an escape as in a literal of Python. Backslashes stay, so that it may be done again.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shortened(text: str, most: int = 120) -> str:
    """Returns a text that a person can read at once: visible characters, and dots for the middle of a long one."""
    text = printable(text if len(text) <= 8 * most else text[: 4 * most] + text[-4 * most :])
    kept = most - 5
    return text if len(text) <= most else f"{text[: kept - kept // 2]} ... {text[len(text) - kept // 2 :]}"


def show(value: object) -> str:
    """Returns a value as it may stand in a message, however long it is."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deep {type(value).__name__}"
    return text[:160] + "..." if len(text) > 160 else text


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ": did you mean a, b?" with the known names that are most like `name`; "" if none is."""
    import difflib

    close = difflib.get_close_matches(name, list(dict.fromkeys(islice(known, _MOST_COMPARED))), 3)
    return f": did you mean {', '.join(close)}?" if close else ""


class ShardioError(Exception):
    """Base of every error that shardio raises about the world outside the program.

    Its arguments are the lines of its message. None of them can become two, whatever name is in it, nor longer than
    `LONGEST_LINE`.
    """

    def __str__(self) -> str:
        return "\n  ".join(shortened(str(line), LONGEST_LINE) for line in self.args)


class FormatError(ShardioError, ValueError):
    """A file of a shard set is not what docs/format.md says it must be."""


class SetNotFoundError(ShardioError, FileNotFoundError):
    """There is no published shard set (no manifest.json), or not the split that was asked for."""


class SourceError(ShardioError, ValueError):
    """The image collection is not laid out as a converter can read it."""


class DecodeError(ShardioError, ValueError):
    """One image was refused. `reason` is the class of causes, the message is the detail."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return shortened(f"{self.reason}: {self.detail}", LONGEST_LINE)


class ConvertError(ShardioError, RuntimeError):
    """A conversion cannot go on, or nothing may be published. What is done is kept."""


class SpaceError(ShardioError, OSError):
    """The filesystem has too little room for what is to be written, or the memory for what is to be read into it."""


class CacheError(ShardioError, ValueError):
    """A folder cannot be used as a cache of shard sets: it holds something else, or is not on this machine."""


class LaunchError(ShardioError, ValueError):
    """The launcher's variables do not give one rank of one world."""
