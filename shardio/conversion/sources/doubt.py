"""DoubtError lists what SRC may mean, and the command for each meaning. This module reads no file."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shardio.errors import SourceError


class Reading(NamedTuple):
    """One meaning that SRC may have, and the SRC and options of `convert` with which it has that meaning."""

    meaning: str
    """The meaning in words, such as "these 2 folders are classes"."""
    options: Mapping[str, str | Sequence[str] | None]
    """The value, or several values, of each option, by its name with dashes. None: the option must not be given."""
    src: str | Path | None = None
    """Another SRC; None for the same."""


UNLABELED = Reading("no image has a label", {"--labels": "none"})


class DoubtError(SourceError):
    """Raised if SRC is ambiguous. `found` says why, and `readings` are the meanings that SRC may have. The message has
    a line for each reading with a command to copy: `shardio`, the words `args`, and the options of the reading."""

    def __init__(self, src: str | Path, found: str, readings: Sequence[Reading], args: Sequence[str] = ()) -> None:
        self.src, self.found, self.readings = str(src), found, tuple(readings)
        self.commands = tuple(_command(args or ("convert", self.src, "OUT"), self.src, one) for one in readings)
        """The arguments of `shardio` for each reading."""
        lines = (
            f"if {reading.meaning}: shardio {shlex.join(command)}"
            for reading, command in zip(self.readings, self.commands, strict=True)
        )
        super().__init__(f"{src}: {found}", *lines)

    def with_args(self, args: Sequence[str]) -> DoubtError:
        """Returns the same error with other commands: each has the words `args`, the arguments of a call of `shardio`,
        and the options of a reading in place of those in `args`."""
        return DoubtError(self.src, self.found, self.readings, args)


def _command(args: Sequence[str], src: str, reading: Reading) -> tuple[str, ...]:
    kept = tuple(_without(args, reading.options))
    if reading.src is not None:
        kept = tuple(str(reading.src) if os.path.abspath(arg) == src else arg for arg in kept)
    values = {name: (found,) if isinstance(found, str) else found or () for name, found in reading.options.items()}
    given = ((name, value) for name, several in values.items() for value in several)
    return (*kept, *(word for pair in given for word in pair))


def _without(args: Sequence[str], names: Mapping[str, object]) -> Iterator[str]:
    """Yields the arguments `args` without the options `names` and their values."""
    rest = iter(args)
    for arg in rest:
        name, is_joined, _ = arg.partition("=")
        if name not in names:
            yield arg
        elif not is_joined:
            next(rest, None)
