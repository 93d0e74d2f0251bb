"""Tells which kernels in C this installation has, and what the lack of them costs.

They are built at installation where there is a C compiler. Without them numpy copies, Python reads files and torch
resamples, changes pixels and fits pictures to samples, to the same result.
"""

from __future__ import annotations

import os

from shardio.system.caller import warn_caller

try:
    from shardio.system import _rowcopy as _rowcopy
except ImportError:  # installed without a compiler
    _rowcopy = None  # type: ignore[assignment]
try:
    from shardio.system import _rowread as _rowread
except ImportError:
    _rowread = None  # type: ignore[assignment]
try:
    from shardio.system import _resample as _resample
except ImportError:
    _resample = None  # type: ignore[assignment]
try:
    from shardio.system import _pixels as _pixels
except ImportError:
    _pixels = None  # type: ignore[assignment]
try:
    from shardio.system import _fit as _fit
except ImportError:
    _fit = None  # type: ignore[assignment]

KERNELS: tuple[str, ...] = ("numpy", *(filter(None, _rowcopy.KERNELS) if _rowcopy else ()))
"""Those that can copy samples here."""

_FORCED = os.environ.get("SHARDIO_KERNEL", "")
if _FORCED and _FORCED not in KERNELS:
    raise ImportError(f"SHARDIO_KERNEL: expected one of {', '.join(KERNELS)}, found {_FORCED!r}")
DEFAULT_KERNEL: str = _FORCED or (_rowcopy.BEST if _rowcopy else "numpy")
"""The kernel that copies if none is named: the best on this processor, or the one in the environment variable
SHARDIO_KERNEL. AVX-512 is hardly faster, as memory is the limit, and lowers the clock of older processors."""

_COSTS = (
    (_resample, "augmentation on the CPU is 17 to 26 times slower"),
    (_pixels, "operations of colour and geometry on the CPU are 10 times slower or more"),
    (_rowcopy, "a page of a mapped file that storage does not give ends the process by SIGBUS, without an error"),
    (_rowread, "reading by pread or past the page cache waits for the GIL after each sample"),
    (_fit, "a conversion takes a fifth longer"),
)
_warned = False


def kernels_in_use() -> dict[str, str]:
    """Returns which code copies, reads, resamples and changes samples on the CPU, and fits pictures to samples.

    torch also fits them where the processor has not what the kernel in C needs, AVX2.
    """
    return {
        "copy": DEFAULT_KERNEL,
        "read": "C" if _rowread else "Python",
        "resample": "C" if _resample else "torch",
        "pixels": "C" if _pixels else "torch",
        "fit": "C" if _fit and _fit.AVAILABLE else "torch",
    }


def missing_kernels() -> str:
    """Returns what it costs that kernels are missing, and the way out; nothing if all are there."""
    costs = [cost for kernel, cost in _COSTS if kernel is None]
    if not costs:
        return ""
    return (
        f"shardio was installed without its kernels in C: {'; '.join(costs)}. Install a C compiler, and then shardio "
        "again from source (pip install --force-reinstall --no-deps --no-cache-dir --no-binary shardio shardio)"
    )


def warn_of_missing_kernels() -> None:
    """Gives a RuntimeWarning, once per process, unless SHARDIO_KERNEL=numpy says that they are not wanted."""
    global _warned
    if not _warned and _FORCED != "numpy" and (text := missing_kernels()):
        _warned = True
        warn_caller(f"{text}; SHARDIO_KERNEL=numpy says that it is meant so")
