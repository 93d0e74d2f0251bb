"""Keeps functions away from torch's compiler (`eager`), and warns at the caller's line (`warn_caller`).

torch.compile does not compile an `eager` function, nor anything that it calls: it breaks its graph there. Threads,
mapped memory and NumPy's random integers cannot be traced, and compiling would not make them faster.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Returns `function`, wrapped so that torch.compile does not trace it, like torch.compiler.disable.

    torch's decorator imports the compiler when it is applied, which takes a second. This decorator needs no torch: it
    checks at each call whether the compiler has been imported.
    """

    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        # While it is being imported nothing is compiled, and waiting for the import could be waiting for the thread
        # that imports it, which may be waiting for this one to end.
        spec = getattr(sys.modules.get("torch._dynamo"), "__spec__", None)
        if spec is None or getattr(spec, "_initializing", False):
            return function(*args, **kwargs)
        if disabled is None:
            disabled = cast(Callable[P, R], sys.modules["torch"].compiler.disable(function))
        return disabled(*args, **kwargs)

    return call


_OWN = str(Path(__file__).parents[1]) + os.sep
# torch's compiler calls eager functions from here.
_COMPILER = os.path.join("torch", "_dynamo", "")


def warn_caller(text: str) -> None:
    """Emits a RuntimeWarning at the line of the caller's code that called into shardio, however deep this call is."""
    frame, levels = sys._getframe(), 1
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_OWN) or _COMPILER in frame.f_code.co_filename
    ):
        frame, levels = frame.f_back, levels + 1
    warnings.warn(text, RuntimeWarning, stacklevel=levels)
