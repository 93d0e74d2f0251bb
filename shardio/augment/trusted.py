"""Compares each Triton kernel with torch's operations before the kernel is used.

Triton compiles a kernel on the machine where it runs, so no test elsewhere can vouch for it. For the first batch that
needs a kernel, the kernel and torch's operations compute a few images, which are compared on the device. If the kernel
fails or gives other pixels, torch's operations are used instead, with a warning. Later batches are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardio.augment.resample import Statistics, affine_of
from shardio.errors import printable
from shardio.system.eager import warn_caller

try:
    import triton as triton
except Exception:  # there are wheels for Linux only; torch for CUDA brings them
    triton = None

MOST_COMPARED = 8
"""The maximum number of images of a batch that are compared."""
# Roundings near a half may differ: by one gray level, in this share of the values, and in a few of a tiny image.
_MOST_APART = 0.02
_MOST_VALUES_APART = 3
# What products of float32 may lose, in gray levels.
_ROUNDING = 1e-3

_MOST_CHANNELS = 64
# Places in an image are int32, with room for the last program, which may end outside.
_MOST_NBYTES = 1 << 30
_MOST_PROGRAMS = (1 << 31) - 1

KINDS = ("resample", "pixels")
"""The kinds of work that kernels do, as `ShardLoader.stats` names them."""

Signature = tuple[str, torch.device, tuple[object, ...]]
"""Identifies a compiled kernel: one of KINDS, a device, and a variant (channels, flags, dtypes)."""

Compared = tuple[Tensor, Callable[[], Tensor]]
"""Images (n, C, H, W) computed by torch's operations, and a function that computes them with the kernel."""

_chosen: dict[Signature, str] = {}


def fits(images: Tensor, size: tuple[int, int], programs: int) -> bool:
    """Returns whether kernels can turn `images` into images of `size`, height and width, by a launch of `programs`."""
    if images.dtype != torch.uint8 or not images.numel():
        return False
    _, channels, height, width = images.shape
    nbytes = max(height * width, size[0] * size[1]) * channels
    return channels <= _MOST_CHANNELS and nbytes < _MOST_NBYTES and 0 < programs <= _MOST_PROGRAMS


def is_trusted(signature: Signature, compare: Callable[[], Sequence[Compared]], statistics: Statistics | None) -> bool:
    """Returns whether to use the kernel of `signature`. The first call for a signature waits for the comparison.

    `compare` returns the images to compare. Images of a floating-point type are normalized by `statistics`. Warns if
    the kernel fails or gives other images.
    """
    if triton is not None and signature not in _chosen:
        kind, device, _ = signature
        try:
            problem = _difference(device, compare(), statistics)
        except Exception as error:
            if isinstance(error, MemoryError) or "out of memory" in str(error):
                return False  # this time: a later batch may find more memory
            problem = f"failed: {type(error).__name__}: {error}"
            if isinstance(error, OSError):
                problem += "; set TRITON_CACHE_DIR to a folder on a local disk"
        _chosen[signature] = "torch" if problem else "Triton"
        if problem:
            gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device
            text = f"the kernel {kind!r} of Triton {triton.__version__} on {gpu} {problem}"
            warn_caller(printable(f"{text}. Torch's operations are used instead, which are slower"))
    return _chosen.get(signature) == "Triton"


def chosen_on(device: torch.device) -> dict[str, str | None]:
    """Returns what computed each of KINDS on a CUDA device: "Triton", "torch", "Triton, torch", or None before use."""
    if triton is None:
        return dict.fromkeys(KINDS, "torch")
    ways = {kind: {way for key, way in _chosen.items() if key[:2] == (kind, device)} for kind in KINDS}
    return {kind: ", ".join(sorted(some)) or None for kind, some in ways.items()}


def _difference(device: torch.device, compared: Sequence[Compared], statistics: Statistics | None) -> str | None:
    """Returns a text on how the kernel's images differ from torch's images; None if they agree."""
    for expected, by_kernel in compared:
        try:
            found = by_kernel()
        except OSError:  # other processes compile into the same folder; by now the files may be there
            found = by_kernel()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # an access out of bounds is reported here, under the kernel's name
        if found.shape != expected.shape or found.dtype != expected.dtype:
            made, right = (f"{images.dtype} of {tuple(images.shape)}" for images in (found, expected))
            return f"differs from torch's operations: {made}, not {right}"
        apart = (found.double() - expected.double()).abs()
        if found.dtype.is_floating_point:
            apart -= torch.finfo(found.dtype).eps * found.double().abs()
            if statistics is not None:  # a gray level is the factor of its channel
                apart /= affine_of(statistics)[0].to(found.device)[:, None, None]
        largest, count = float(apart.max()), int((apart > _ROUNDING).sum())
        # `largest` may be NaN.
        if not largest <= 1 + _ROUNDING or count > max(_MOST_APART * expected.numel(), _MOST_VALUES_APART):
            share = count / expected.numel()
            return f"differs from torch's operations by up to {largest:.3g} gray levels, in {share:.1%} of values"
    return None
