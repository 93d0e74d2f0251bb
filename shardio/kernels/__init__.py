"""The kernels in C: `rowcopy`, `rowread`, `resample` and `pixels`; and `finalized`, which has to be in C.

Each is called only by the Python module of its name."""

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Returns a kernel, at its first import. Raises an ImportError that says what to do if it was not built."""
    if not name.startswith("_") or name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError:
        raise ImportError(
            f"{__path__[0]}: the kernel {name} is not built here. If shardio is installed, run Python outside of the "
            "source folder; or build the kernels by `pip install -e .`"
        ) from None
