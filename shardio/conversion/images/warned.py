"""Collects the warnings that libraries raise about an image, so they go into the report and not to the terminal.

`warnings.catch_warnings` changes the filters of all threads. The filter of this module applies to a thread only while
the thread is inside `KeptWarnings`. It comes before all other filters, so neither `-W error` nor a caller's filter
decides whether an image is refused.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from typing import Any

# Warnings about programs, and not about the image at which they were noticed.
_OF_CODE = (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ImportWarning, ResourceWarning, SyntaxWarning)


class _Keeper:
    """Catches warnings inside `KeptWarnings`. One object is both the message pattern and the category of a filter.

    `warnings` first calls `match` with a warning's text, then, in the same thread, `__subclasscheck__` with its
    category. The second call adds the text to the block's list, unless the warning is about programs, such as a
    DeprecationWarning: these are ignored.
    """

    def match(self, text: str) -> bool:
        _threads.text = text
        return getattr(_threads, "kept", None) is not None

    def __subclasscheck__(self, category: type[Warning]) -> bool:
        if (kept := getattr(_threads, "kept", None)) is None:
            return False
        if not issubclass(category, _OF_CODE):
            kept.append(_threads.text)
        return True


_threads = threading.local()
_lock = threading.Lock()
_keeper = _Keeper()
_FILTER: Any = ("ignore", _keeper, _keeper, None, 0)


class KeptWarnings:
    """A `with` block that yields a list, and appends the text of each of this thread's warnings in the block to it.

    The warnings are not shown or raised. This is a class because a generator would take three times as long to enter
    and leave, which happens for every image.
    """

    def __enter__(self) -> list[str]:
        filters: Any = warnings.filters
        if not filters or filters[0] is not _FILTER:
            with _lock:  # it stays there: outside of the blocks it matches nothing
                with contextlib.suppress(ValueError):
                    filters.remove(_FILTER)
                filters.insert(0, _FILTER)
        self._before = getattr(_threads, "kept", None)
        kept: list[str] = []
        _threads.kept = kept
        return kept

    def __exit__(self, *error: object) -> None:
        _threads.kept = self._before
