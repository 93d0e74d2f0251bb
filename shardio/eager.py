"""Functions that torch.compile leaves alone: it breaks its graph around a call, and traces nothing of what is in it.

Threads, mapped memory and NumPy's random integers cannot be traced, and there is nothing in them to be made faster.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator, as torch.compiler.disable is one.

    That imports the compiler, which takes a second, where it is applied. This one looks at each call whether anybody
    has imported it; and it needs no torch.
    """

    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = cast(Callable[P, R], sys.modules["torch"].compiler.disable(function))
        return disabled(*args, **kwargs)

    return call
