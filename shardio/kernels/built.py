"""Which kernels in C this installation has, and the cost of a missing kernel.

They are built at installation where there is a C compiler. Without them numpy copies, Python reads files and torch
does the rest, with the same results.
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
try:
    from shardio.kernels import _fit as _fit
except ImportError:
    _fit = None  # type: ignore[assignment]

KERNELS: tuple[str, ...] = ("numpy", *(filter(None, _rowcopy.KERNELS) if _rowcopy else ()))
"""The ways of copying samples that this processor can run."""

_FORCED = os.environ.get("SHARDIO_KERNEL", "")
if _FORCED and _FORCED not in KERNELS:
    raise ImportError(f"SHARDIO_KERNEL: expected one of {', '.join(KERNELS)}, found {_FORCED!r}")
DEFAULT_KERNEL: str = _FORCED or (_rowcopy.BEST if _rowcopy else "numpy")
"""The kernel that copies unless another is named: the best for this processor, or SHARDIO_KERNEL of the environment.
AVX-512 is hardly faster, as memory is the limit, and lowers the clock of older processors."""

_COSTS = (
    (_resample, "augmentation on the CPU is 17 to 26 times slower"),
    (_pixels, "color and geometry on the CPU are at least 10 times slower"),
    (_rowcopy, "a page of a mapped file that storage fails to deliver kills the process by SIGBUS, without an error"),
    (_rowread, "reading by pread or past the page cache waits for the GIL after each sample"),
    (_fit, "a conversion takes a fifth longer"),
)
_warned = False


def kernels_in_use() -> dict[str, str]:
    """Returns which code copies, reads, resamples and changes samples on the CPU, and fits images to samples.

    torch also fits them on processors without AVX2, which the kernel in C needs.
    """
    return {
        "copy": DEFAULT_KERNEL,
        "read": "C" if _rowread else "Python",
        "resample": "C" if _resample else "torch",
        "pixels": "C" if _pixels else "torch",
        "fit": "C" if _fit and _fit.AVAILABLE else "torch",
    }


def missing_kernels() -> str:
    """Returns what the missing kernels cost and how to get them; an empty string if none is missing."""
    costs = [cost for kernel, cost in _COSTS if kernel is None]
    if not costs:
        return ""
    return (
        f"shardio was installed without its kernels in C: {'; '.join(costs)}. Install a C compiler, then reinstall "
        "shardio from source (pip install --force-reinstall --no-deps --no-cache-dir --no-binary shardio shardio)"
    )


def warn_of_missing_kernels() -> None:
    """Emits a RuntimeWarning, once per process, unless SHARDIO_KERNEL=numpy says that no kernels are wanted."""
    global _warned
    if not _warned and _FORCED != "numpy" and (text := missing_kernels()):
        _warned = True
        warn_caller(f"{text}; set SHARDIO_KERNEL=numpy to silence this warning")
