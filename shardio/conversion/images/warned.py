"""Keeps the warnings of libraries that read and decode an image with that image, and from the terminal.

`warnings.catch_warnings` changes the filters of all threads. The one filter here applies to a thread only as long as it
is inside `KeptWarnings`. It stands before all others, so that neither `-W error` nor a filter of the caller's decides
whether an image is refused.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from typing import Any

# Warnings about programs, and not about the image at which they were noticed.
_OF_CODE = (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ImportWarning, ResourceWarning, SyntaxWarning)


class _Keeper:
    """Both the pattern and the category of the filter: `warnings` asks for the one and then, in the same thread, for
    the other."""

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
    """The texts of this thread's warnings inside the block, as they come. They go nowhere else.

    A class: entering and leaving a generator takes three times as long, and this is done for every image.
    """

    def __enter__(self) -> list[str]:
        _stand_first()
        self._before = getattr(_threads, "kept", None)
        kept: list[str] = []
        _threads.kept = kept
        return kept

    def __exit__(self, *error: object) -> None:
        _threads.kept = self._before


def _stand_first() -> None:
    """Puts the filter before all others, where it stays: outside of the blocks it matches nothing."""
    filters: Any = warnings.filters
    if not filters or filters[0] is not _FILTER:
        with _lock:
            with contextlib.suppress(ValueError):
                filters.remove(_FILTER)
            filters.insert(0, _FILTER)
