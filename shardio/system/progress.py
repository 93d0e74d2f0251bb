"""Progress bars in terminals and notebooks, and progress lines in the logs of other jobs.

Only this module imports tqdm, and it is imported only where a bar is wanted: training never imports it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
import threading
from collections.abc import Iterator, MutableMapping
from typing import Any

import tqdm.std

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
    """Progress on stderr: a bar in a terminal or notebook, elsewhere a line every 30 seconds and a line at the end."""

    n: float
    initial: float
    last_print_n: float
    total: float | None

    def __init__(self, *, shown: bool = True, **options: Any) -> None:
        self._ticks: threading.Event | None = None
        self.is_log = not (in_notebook() or _is_terminal())
        if self.is_log:
            options |= {"file": _Lines(), "mininterval": _LOG_SECONDS, "delay": _LOG_SECONDS, "miniters": 1}
        super().__init__(disable=not shown, ncols=_columns(), nrows=_MOST_BARS, **options)

    @property
    def format_dict(self) -> MutableMapping[str, Any]:
        return {**super().format_dict, "ncols": _columns()}

    def refresh(self, *arguments: Any, **options: Any) -> Any:
        """Draws the bar, or writes a line to a log: none during the first 30 seconds."""
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
        self._ticks = threading.Event()
        clock = threading.Thread(target=self._tick, args=(self._ticks,), name="shardio-bar", daemon=True)
        clock.start()
        try:
            yield
        finally:
            self.begun()
            clock.join()

    def begun(self) -> None:
        """Ends the text of `before_it_begins`, if it is still shown: from here on, the bar shows progress."""
        if self._ticks is not None:
            self._ticks.set()
            self._ticks = None
            self.set_description_str(None, refresh=False)

    def _tick(self, ends: threading.Event) -> None:
        while not ends.wait(_LOG_SECONDS if self.is_log else _TICK_SECONDS):
            self.refresh()


class BytesBar(Bar):
    def __init__(self, **options: Any) -> None:
        super().__init__(unit="B", unit_scale=True, **options)


def _is_terminal() -> bool:
    with contextlib.suppress(ValueError, AttributeError):  # closed, or there is none
        return sys.stderr.isatty()
    return False


def _columns() -> int:
    """Returns the width of a bar in columns. Never 0, for which tqdm shows nothing.

    Terminals of containers, CI or launchers may report a width of 0.
    """
    columns = 0
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no terminal, or closed
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    return (columns or shutil.get_terminal_size().columns) - 1  # a full line would break
