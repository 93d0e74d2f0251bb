"""Which kernels in C this installation has, and the cost of a missing kernel.

Kernels are built at installation if there is a C compiler. Without the kernels, numpy copies, Python reads files and
torch resizes in a conversion, with the same results; transforms raise ImportError.
"""

from __future__ import annotations

import os

from shardio.system.eager import warn_caller

try:
    from shardio.kernels import _rowcopy as _rowcopy
except ImportError:  # installed without a compiler
    _rowcopy = None  # type: ignore[assignment]
try:
    from shardio.kernels import _rowread as _rowread
except ImportError:
    _rowread = None  # type: ignore[assignment]
try:
    from shardio.kernels import _resample as _resample
except ImportError:
    _resample = None  # type: ignore[assignment]
try:
    from shardio.kernels import _pixels as _pixels
except ImportError:
    _pixels = None  # type: ignore[assignment]

KERNELS: tuple[str, ...] = ("numpy", *(filter(None, _rowcopy.KERNELS) if _rowcopy else ()))
"""The names of the kernels for copying samples that this processor can run; "numpy" is always among them."""

_FORCED = os.environ.get("SHARDIO_KERNEL", "")
if _FORCED and _FORCED not in KERNELS:
    raise ImportError(f"environment variable SHARDIO_KERNEL: expected one of {', '.join(KERNELS)}, found {_FORCED!r}")
DEFAULT_KERNEL: str = _FORCED or (_rowcopy.BEST if _rowcopy else "numpy")
"""The default kernel for copying samples: the environment variable SHARDIO_KERNEL, or the best for this processor.

AVX-512 is hardly faster, as memory is the limit, and lowers the clock of older processors.
"""

_COSTS = (
    (_resample, "transforms do not work, and a conversion takes a fifth longer"),
    (_pixels, "transforms of color and geometry do not work"),
    (_rowcopy, "a page of a mapped file that storage fails to deliver kills the process by SIGBUS, without an error"),
    (_rowread, "reading by pread or past the page cache waits for the GIL after each sample"),
)
_warned = False


def kernels_in_use() -> dict[str, str]:
    """Returns the name of the code for each kind of work on the CPU, such as {"read": "C", "resample": "avx2"}."""
    return {
        "copy": DEFAULT_KERNEL,
        "read": "C" if _rowread else "Python",
        "resample": _resample.FORMS[0] if _resample else "torch",
        "pixels": "C" if _pixels else "none",
    }


def missing_kernels() -> str:
    """Returns a text about what the missing kernels cost, and how to install them; "" if none is missing."""
    costs = [cost for kernel, cost in _COSTS if kernel is None]
    if not costs:
        return ""
    return (
        f"shardio was installed without its kernels in C: {'; '.join(costs)}. Install a C compiler, then reinstall "
        "shardio from source (pip install --force-reinstall --no-deps --no-cache-dir --no-binary shardio shardio)"
    )


def warn_of_missing_kernels() -> None:
    """Warns once per process if kernels are missing, unless the environment variable SHARDIO_KERNEL is "numpy"."""
    global _warned
    if not _warned and _FORCED != "numpy" and (text := missing_kernels()):
        _warned = True
        warn_caller(f"{text}; set SHARDIO_KERNEL=numpy to silence this warning")
