"""The output of commands: lines, JSON, tables, and human-readable amounts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import textwrap
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from shardio.errors import printable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from shardio.sets.levels import Levels

# Nothing is printed about servers that answer sooner.
_TELL_SECONDS = 5.0
_MOST_SHOWN = 12


def say(line: str, err: bool = False) -> None:
    """Prints one line. Escapes characters that the terminal cannot show."""
    click.echo(printable(line), err=err)


def show(result: Mapping[str, Any] | DataclassInstance | Iterable[str]) -> None:
    """Prints the result of a command: a mapping or dataclass as one JSON object, or lines of text."""
    if dataclasses.is_dataclass(result):
        result = dataclasses.asdict(result)
    if isinstance(result, Mapping):
        click.echo(json.dumps(result))
        return
    for line in result:
        say(line)


def next_step(*words: object) -> str:
    """Returns the last line of a command's output: the command to type next."""
    return "next: " + shlex.join(["shardio", *map(str, words)])


def next_view(out: object, split: str, samples: Sequence[int]) -> str:
    """Returns the last line of a command that found samples: the `shardio view` command that shows the first dozen."""
    words = [] if split == "train" else ["--split", split]
    return next_step("view", out, *words, "--indices", ",".join(map(str, samples[:_MOST_SHOWN])))


def table(columns: Mapping[str, Sequence[str]], right: Sequence[str] = (), indent: str = "") -> Iterator[str]:
    """Yields the lines of a table: `columns` has the cells by title. Columns in `right` are aligned like numbers."""
    padded = []
    for title, cells in columns.items():
        texts = [title, *cells]
        widest = max(map(len, texts))
        padded.append([text.rjust(widest) if title in right else text.ljust(widest) for text in texts])
    for row in zip(*padded, strict=True):
        yield indent + "  ".join(row).rstrip()


def wrapped(text: str, first: str, rest: str, most: int | None = None) -> list[str]:
    """Returns a text wrapped to at most `most` lines of 80 columns.

    The first line begins with `first`, the others with `rest`. Words are never split, because they may be paths or
    parts of commands.
    """
    return textwrap.wrap(
        printable(text),
        80,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
        max_lines=most,
        placeholder=" ...",
    )


def levels_text(levels: Levels) -> str:
    """Returns mean and standard deviation of each channel, to three decimals."""
    mean, std = (", ".join(f"{number:.3f}" for number in numbers) for numbers in (levels.mean, levels.std))
    return f"mean {mean}; std {std} ({levels.num_samples:,} of {levels.split})"


def counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


@contextlib.contextmanager
def telling_of_servers(paths: Sequence[str]) -> Iterator[None]:
    """If the block takes more than five seconds, prints which of `paths` are on servers, and the longest wait."""
    from shardio.sets.names import is_url, without_credentials
    from shardio.sets.remote import SMALL_FILE_SECONDS

    names = ", ".join(without_credentials(path) for path in paths if is_url(path))
    line = f"shardio: still waiting for {names}: for each manifest and listing at most {SMALL_FILE_SECONDS:g} seconds"
    timer = threading.Timer(_TELL_SECONDS, say, [line], {"err": True})
    timer.daemon = True
    if names:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
