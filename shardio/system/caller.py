"""Gives warnings at the line of the caller that led to them, however deep inside of shardio they arise."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

_OWN = str(Path(__file__).parents[1]) + os.sep
# torch's compiler calls the functions that it leaves alone from here.
_COMPILER = os.path.join("torch", "_dynamo", "")


def warn_caller(text: str) -> None:
    """Gives a RuntimeWarning at the last line that was run outside of shardio."""
    frame, levels = sys._getframe(), 1
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_OWN) or _COMPILER in frame.f_code.co_filename
    ):
        frame, levels = frame.f_back, levels + 1
    warnings.warn(text, RuntimeWarning, stacklevel=levels)
