"""Copies scattered rows of a matrix, or a window of each, into one block of memory: natively, or else by numpy.

The native kernel (_rowcopy.c) is built at installation where there is a C compiler. Both ways do the same, which the
same tests hold. Copying releases the GIL; any number of threads may copy at the same time into different memory.

Rows may lie in a mapped file whose storage fails, or which another process cuts. Then the native kernel stops at the
row, and says so; numpy's copy is ended by SIGBUS, with the process.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardio.system.kernels import DEFAULT_KERNEL
from shardio.system.kernels import _rowcopy as _native


def copy_rows(
    rows: NDArray[np.uint8], numbers: NDArray[np.int64], out: NDArray[np.uint8], kernel: str = DEFAULT_KERNEL
) -> int:
    """Sets out[i] = rows[numbers[i]]. `rows` is (n, row_nbytes), `out` (len(numbers), row_nbytes), both C-contiguous.

    Returns how many rows were copied: all, unless the storage behind the next one fails. Raises IndexError before
    anything is copied if a number is not from 0 to n - 1.
    """
    count, nbytes = out.shape
    if rows.shape[1] != nbytes or len(numbers) != count:
        raise ValueError(f"expected out to be {(len(numbers), rows.shape[1])}; found {out.shape}")
    if kernel == "numpy":
        _check_numbers(numbers, len(rows))
        # The numbers are inside, so that "clip" clips nothing; the default mode would first copy all of `out`.
        np.take(rows, numbers, axis=0, out=out, mode="clip")
        return len(numbers)
    done: int = _native.copy(rows, nbytes, _int64(numbers), None, 1, nbytes, nbytes, out, _native.KERNELS.index(kernel))
    return done


def copy_windows(
    images: NDArray[np.uint8],
    numbers: NDArray[np.int64],
    tops: NDArray[np.int64],
    lefts: NDArray[np.int64],
    out: NDArray[np.uint8],
    kernel: str = DEFAULT_KERNEL,
) -> int:
    """Sets out[i] = images[numbers[i], tops[i] : tops[i] + h, lefts[i] : lefts[i] + w], (h, w) = out.shape[1:3].

    `images` is (n, height, width, channels), `out` (len(numbers), h, w, channels), both C-contiguous. Returns how many
    windows were copied, as copy_rows does. Raises IndexError before anything is copied if a window is not inside.
    """
    num_images, height, width, channels = images.shape
    count, h, w, out_channels = out.shape
    if out_channels != channels or not (0 < h <= height and 0 < w <= width):
        raise ValueError(f"expected windows of at most {images.shape[1:]}; found {out.shape[1:]}")
    if not len(numbers) == len(tops) == len(lefts) == count:
        raise ValueError(f"expected {count} numbers, tops and lefts; found {len(numbers)}, {len(tops)}, {len(lefts)}")
    _check_numbers(numbers, num_images)
    if count and (tops.min() < 0 or tops.max() > height - h or lefts.min() < 0 or lefts.max() > width - w):
        raise IndexError(f"windows of {(h, w)} must begin from (0, 0) to {(height - h, width - w)}")
    if kernel == "numpy":
        for image, number, top, left in zip(out, numbers.tolist(), tops.tolist(), lefts.tolist(), strict=True):
            np.copyto(image, images[number, top : top + h, left : left + w])
        return len(numbers)
    stride = width * channels
    starts = tops * stride + lefts * channels
    pieces, nbytes = (1, h * stride) if w == width else (h, w * channels)
    shape = (pieces, nbytes, stride)
    done: int = _native.copy(
        images, height * stride, _int64(numbers), _int64(starts), *shape, out, _native.KERNELS.index(kernel)
    )
    return done


def _check_numbers(numbers: NDArray[np.int64], count: int) -> None:
    if len(numbers) and not (numbers.min() >= 0 and numbers.max() < count):
        raise IndexError(f"numbers must be from 0 to {count - 1}; found {numbers.min()} to {numbers.max()}")


def _int64(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.ascontiguousarray(numbers, np.int64)
