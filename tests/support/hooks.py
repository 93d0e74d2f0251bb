"""Calls that a test makes before those of others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest


def call_before(
    patch: pytest.MonkeyPatch, holder: Any, name: str, do: Callable[..., object], *, once: bool = False
) -> None:
    """Calls `do` with the same arguments before each call of the function `holder.name`, or before the first alone.

    With `once`, calls of other threads wait until `do` has returned.
    """
    real = getattr(holder, name)
    first = threading.RLock()
    done = False

    def call(*args: Any, **options: Any) -> Any:
        nonlocal done
        if not once:
            do(*args, **options)
        else:
            with first:
                if not done:
                    done = True
                    do(*args, **options)
        return real(*args, **options)

    patch.setattr(holder, name, call)
