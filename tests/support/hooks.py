"""Calls that a test makes before those of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def call_before(
    patch: pytest.MonkeyPatch, holder: Any, name: str, do: Callable[..., object], *, once: bool = False
) -> None:
    """Calls `do` with the same arguments before each call of the function `holder.name`, or before the first alone."""
    real = getattr(holder, name)

    def call(*args: Any, **options: Any) -> Any:
        if once:
            patch.setattr(holder, name, real)
        do(*args, **options)
        return real(*args, **options)

    patch.setattr(holder, name, call)
