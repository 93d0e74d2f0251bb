"""Progress bars in terminals and notebooks, and progress lines in the logs of other jobs.

Only this module imports tqdm, and it is imported only where a bar is wanted: training never imports it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, MutableMapping
from typing import Any

import tqdm.std

from shardio.system.threads import Ticker

# Bars stand one under the other. With a number here, tqdm need not ask for the rows of the terminal.
_MOST_BARS = 20
# How often a log gets a line. Shorter work gets none.
_LOG_SECONDS = 30.0
_TICK_SECONDS = 0.5


def in_notebook() -> bool:
    """Returns whether this process is the kernel of a Jupyter notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})


# tqdm's class for text; in a notebook with ipywidgets, its class for notebooks.
_Tqdm: Any = tqdm.std.tqdm
if in_notebook() and importlib.util.find_spec("ipywidgets"):
    _Tqdm = importlib.import_module("tqdm.notebook").tqdm_notebook


class _Lines:
    """A stream for tqdm that writes each update to stderr as a line. Text that cannot be written is lost."""

    def write(self, text: str) -> None:
        if text := text.strip("\r\n "):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed, or there is none
                sys.stderr.write(f"{text}\n")

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()


class Bar(_Tqdm):  # type: ignore[misc]  # one class or the other
    """Progress on stderr: a bar in a terminal or notebook, elsewhere a line every 30 seconds and a line at the end.

    Prints nothing unless `shown`. `options` are tqdm's.
    """

    n: float
    initial: float
    last_print_n: float
    total: float | None

    def __init__(self, *, shown: bool = True, **options: Any) -> None:
        self._ticker: Ticker | None = None
        self.is_log = not in_notebook()
        with contextlib.suppress(ValueError, AttributeError):  # stderr is closed, or there is none
            self.is_log = self.is_log and not sys.stderr.isatty()
        if self.is_log:
            options |= {"file": _Lines(), "mininterval": _LOG_SECONDS, "delay": _LOG_SECONDS, "miniters": 1}
        super().__init__(disable=not shown, ncols=_columns(), nrows=_MOST_BARS, **options)

    @property
    def format_dict(self) -> MutableMapping[str, Any]:
        return {**super().format_dict, "ncols": _columns()}

    def refresh(self, *arguments: Any, **options: Any) -> Any:
        """Draws the bar, as tqdm's `refresh`. Where progress is printed as lines, prints a line, but none in the first
        30 seconds. Returns True if it has drawn or printed."""
        if not self.is_log or self._time() - getattr(self, "start_t", self._time()) >= self.delay:
            return super().refresh(*arguments, **options)
        return False

    def add(self, more: float, total: int) -> None:
        self.total = total
        self.update(more)

    def reach(self, done: int, total: int) -> None:
        self.add(done - self.n, total)

    @contextlib.contextmanager
    def before_it_begins(self, text: str) -> Iterator[None]:
        """Shows `text` and the elapsed time until the block ends or `begun` is called."""
        if self.disable:
            yield
            return
        self.set_description_str(text, refresh=False)
        self._ticker = Ticker(self, self.refresh, _LOG_SECONDS if self.is_log else _TICK_SECONDS, "shardio-bar")
        self._ticker.begin()
        try:
            yield
        finally:
            self.begun()

    def begun(self) -> None:
        """Ends the text of `before_it_begins`, if it is still shown: from here on, the bar shows progress."""
        ticker, self._ticker = self._ticker, None
        if ticker is not None:
            ticker.close()
            self.set_description_str(None, refresh=False)


BytesBar = functools.partial(Bar, unit="B", unit_scale=True)


def _columns() -> int:
    """Returns the width of a bar in columns. Never 0, for which tqdm shows nothing.

    Terminals of containers, CI or launchers may report a width of 0.
    """
    columns = 0
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no terminal, or closed
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    return (columns or shutil.get_terminal_size().columns) - 1  # a full line would break
