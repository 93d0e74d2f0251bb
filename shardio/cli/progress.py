"""The progress bar of all commands."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import MutableMapping
from typing import Any

from tqdm import tqdm

# Bars stand one under the other. With a number here, tqdm need not ask for the rows of the terminal.
_MOST_BARS = 20


class Bar(tqdm):  # type: ignore[type-arg]  # generic for type checkers only
    """Progress on stderr, if that is a terminal."""

    def __init__(self, *, shown: bool = True, **options: Any) -> None:
        super().__init__(disable=None if shown else True, ncols=_columns(), nrows=_MOST_BARS, **options)

    @property
    def format_dict(self) -> MutableMapping[str, Any]:
        return {**super().format_dict, "ncols": _columns()}

    def add(self, more: float, total: int) -> None:
        self.total = total
        self.update(more)

    def reach(self, done: int, total: int) -> None:
        self.add(done - self.n, total)


class BytesBar(Bar):
    def __init__(self, **options: Any) -> None:
        super().__init__(unit="B", unit_scale=True, **options)


def _columns() -> int:
    """Returns the width of a bar. Terminals of containers, CI or launchers may say 0, where tqdm would show nothing."""
    columns = 0
    with contextlib.suppress(OSError, ValueError):  # no terminal, or closed
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    return (columns or shutil.get_terminal_size().columns) - 1  # a full line would break
