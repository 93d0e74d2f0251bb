"""Runs the steps of a batch on CUDA by Triton kernels, with one launch for each step of the whole batch.

Each program computes some pixels of one image by the operation of this image. So all threads of a program take the
same branch, and a launch serves images with different operations. Images with fewer steps pass the last launches
unchanged. Operations that replace gray levels are lookup tables. The host makes the tables that do not depend on the
image, and joins consecutive tables. For the other tables, a kernel counts gray levels in a launch before the step.
The last launch also normalizes and casts. `shardio.augment.pixels` defines the results: positions are the same, gray
levels differ by at most one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardio.augment.pixels import TABLES, fixed_affine, gaussian, levels_by, run_steps_by_torch
from shardio.augment.resample import Statistics, affine_on, normalized, to_device
from shardio.augment.steps import FILL_AT, Op, Step, Steps
from shardio.augment.steps_cuda import MEASURED, ROOM_AT, TAPS_AT, VALUES_AT
from shardio.augment.trusted import MOST_COMPARED, Compared, fits, is_trusted, triton

if triton is not None:
    from shardio.augment.steps_cuda import blur_lines, measure, step

# Bytes that one program makes, with room for a power of two of channels. With four times as many, the threads of all
# operations in one kernel would take 222 registers each, instead of 72, and few of them would run at a time.
_BLOCK = 512
# Gray levels that are counted at once.
_COUNTED = 2048
# Triton compiles other code for memory that does not begin at a multiple of this number of bytes.
_ALIGNMENT = 16

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def run_steps_if_trusted(
    images: Tensor, steps: Steps, statistics: Statistics | None, dtype: torch.dtype | None
) -> Tensor | None:
    """Returns the result of `run_steps_fused`; None if `fits` or `is_trusted` says that the kernels cannot be used."""
    count, channels, height, width = images.shape
    if not fits(images, (height, width), count * _programs_of_an_image(height, width, channels)):
        return None
    ops = {Op(int(code)) for step in steps for code in np.unique(step.codes)} - {Op.NOTHING}
    kernels = (bool(ops), not ops.isdisjoint(MEASURED), Op.BLUR in ops)
    variant = (channels, *kernels, statistics is not None, _last(statistics, dtype))
    compare = partial(_compared, images, steps, statistics, dtype)
    if not is_trusted(("pixels", images.device, variant), compare, statistics):
        return None
    return run_steps_fused(images, steps, statistics=statistics, dtype=dtype)


def _compared(images: Tensor, steps: Steps, statistics: Statistics | None, dtype: torch.dtype | None) -> list[Compared]:
    """Returns what `is_trusted` compares: a few of the images after each step, and at the end.

    The kernels run each step on torch's result of the step before, since a difference of one gray level may grow.
    """
    some = _some_with_most_operations(steps, len(images))
    some_steps = [Step(step.codes[some], step.values[some]) for step in steps]
    before = after = images[some]
    compared: list[Compared] = []
    for step in some_steps:
        before, after = after, run_steps_by_torch(after, (step,))
        compared.append((after, partial(run_steps_fused, before, (step,))))
    last = partial(run_steps_fused, before, tuple(some_steps[-1:]), statistics=statistics, dtype=dtype)
    made = normalized(after, statistics, dtype, native=False)
    return [*compared, (made, last)]


def _some_with_most_operations(steps: Steps, count: int) -> list[int]:
    """Returns the numbers of at most MOST_COMPARED of `count` images, with as many different operations as possible."""
    codes = np.array([step.codes for step in steps], np.uint8)
    ops, firsts = np.unique(codes, return_index=True)
    with_own_kernel = np.isin(ops, [*MEASURED, Op.BLUR])
    first = firsts[np.argsort(~with_own_kernel, kind="stable")] % count
    return list(dict.fromkeys([*first.tolist(), *range(count)]))[:MOST_COMPARED]


def _last(statistics: Statistics | None, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype that the last launch writes: `dtype` if it is one of _FLOATS, else float32 or uint8."""
    made = dtype if dtype in _FLOATS else None
    return made or (torch.uint8 if statistics is None else torch.float32)


def run_steps_fused(
    images: Tensor, steps: Steps, *, statistics: Statistics | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns the images after steps, normalization and cast, (B, C, H, W) in channels_last memory.

    The result has `dtype`; by default float32 with `statistics`, and uint8 without. `images` stay unchanged. The host
    does not wait for the device.
    """
    count, channels, height, width = images.shape
    codes, values, levels = _tables_of(steps, count, channels)
    rows, taps = _rows_of(codes, values, height, width)
    device = images.device
    last = _last(statistics, dtype)

    pixels = images.permute(0, 2, 3, 1).contiguous()
    # What a launch does not read may be empty, but has its dtype: Triton compiles other code for another dtype.
    numbers, weights, tables = _sent([rows, taps, levels], device)
    affine = weights if statistics is None else affine_on(device, *map(tuple, statistics))
    most_blurred = int((codes == Op.BLUR).sum(axis=1).max(initial=0))
    room = torch.empty((most_blurred, *pixels.shape[1:]), device=device)

    shape = (rows.shape[2], channels, triton.next_power_of_2(channels), _pixels_of_a_program(channels))
    programs = count * _programs_of_an_image(height, width, channels)
    # Products are rounded before they are added, as torch's operations do it one by one.
    options = {"enable_fp_fusion": False}
    with torch.cuda.device(device if images.is_cuda else -1):  # -1: where it is interpreted
        for number, found in enumerate(codes if len(codes) else [codes]):
            each = numbers[number] if len(codes) else numbers
            if np.isin(found, MEASURED).any():
                measure[(count * channels,)](
                    pixels, each, tables, height * width, rows.shape[2], channels, _COUNTED, **options
                )
            if (found == Op.BLUR).any():
                blur_lines[(programs,)](pixels, each, room, weights, height, width, taps.shape[2], *shape, **options)
            is_last = number >= len(codes) - 1
            out = torch.empty(pixels.shape, dtype=last if is_last else torch.uint8, device=device)
            step[(programs,)](
                pixels,
                out,
                each,
                tables,
                room,
                weights,
                affine,
                height,
                width,
                taps.shape[2],
                *shape,
                len(codes) > 0,
                is_last and statistics is not None,
                **options,
            )
            pixels = out  # the memory of the pixels before is free for the next step
    result = pixels.permute(0, 3, 1, 2)
    return result if dtype is None else result.to(dtype)


def _pixels_of_a_program(channels: int) -> int:
    return max(_BLOCK // (1 << (channels - 1).bit_length()), 1)


def _programs_of_an_image(height: int, width: int, channels: int) -> int:
    return -(-height * width // _pixels_of_a_program(channels))


def _sent(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Returns the arrays as tensors on the device, sent in one copy. Each begins at a multiple of _ALIGNMENT bytes."""
    ends = np.cumsum([0, *(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]).tolist()
    packed = np.zeros(ends[-1], np.uint8)
    for first, array in zip(ends[:-1], arrays, strict=True):
        packed[first : first + array.nbytes] = array.reshape(-1).view(np.uint8)
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    sent = to_device(torch.from_numpy(packed), device) if len(packed) else empty
    return [
        sent[first : first + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for first, array in zip(ends[:-1], arrays, strict=True)
    ]


def _tables_of(
    steps: Steps, count: int, channels: int
) -> tuple[NDArray[np.uint8], NDArray[np.float64], NDArray[np.uint8]]:
    """Returns `steps` as codes (S, B), values (S, B, 1 + FILL_AT + channels), and lookup tables (n, channels, 256).

    The first value is the number of the operation's table, or -1. Consecutive tables of an image are joined. The
    operations of each image move to the front, so S is the largest number of operations of an image. Tables that depend
    on the image are left empty, for the kernel `measure` to fill.
    """
    codes = np.stack([step.codes for step in steps]) if steps else np.zeros((0, count), np.uint8)
    values = np.zeros((*codes.shape, 1 + FILL_AT + channels))
    if steps:
        values[:, :, 1:] = np.stack([step.values for step in steps])
        _to_the_front(codes, values)
    is_made, has_table = np.isin(codes, list(TABLES)), np.isin(codes, [*TABLES, *MEASURED])
    levels = np.zeros((int(has_table.sum()), channels, 256), np.uint8)
    numbers = np.where(has_table, has_table.cumsum().reshape(codes.shape) - 1, -1)
    for op in TABLES:
        chosen = codes == op
        if chosen.any():
            levels[numbers[chosen]] = levels_by(op, values[chosen, 1:], channels)
    for number in range(len(codes) - 1, 0, -1):
        both = is_made[number] & is_made[number - 1]
        here, before = numbers[number, both], numbers[number - 1, both]
        levels[before] = np.take_along_axis(levels[here], levels[before].astype(np.int64), axis=2)
        codes[number, both] = Op.NOTHING
        numbers[number, both] = -1
    values[:, :, 0] = numbers
    _to_the_front(codes, values)
    used = int((codes != Op.NOTHING).sum(axis=0).max(initial=0))
    return codes[:used], values[:used], levels


def _to_the_front(codes: NDArray[np.uint8], values: NDArray[np.float64]) -> None:
    """Moves the operations that do nothing to the end of each image's codes and values, in place."""
    order = np.argsort(codes == Op.NOTHING, axis=0, kind="stable")
    codes[:] = np.take_along_axis(codes, order, axis=0)
    values[:] = np.take_along_axis(values, order[:, :, None], axis=0)


def _rows_of(
    codes: NDArray[np.uint8], values: NDArray[np.float64], height: int, width: int
) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Returns the kernels' row of numbers for each step and image, and the weights of n blurs, (n, 2, taps)."""
    width_of_a_row = 1 + values.shape[2]
    # An even number of float64, so that the rows of each step are aligned.
    rows = np.zeros((*codes.shape, width_of_a_row + width_of_a_row % 2))
    rows[:, :, 0], rows[:, :, 1:width_of_a_row] = codes, values
    numbers = rows[:, :, VALUES_AT:]
    turned = codes == Op.AFFINE
    # Whole numbers, which float64 holds as they are: they were rounded as float64.
    numbers[turned, :6] = fixed_affine(numbers[turned], height, width).reshape(-1, 6)
    blurred = codes == Op.BLUR
    sizes, deviations = numbers[blurred, :2].astype(np.int64), numbers[blurred, 2:4]
    taps = np.zeros((len(sizes), 2, int(sizes.max(initial=0))), np.float32)
    for axis in range(2):
        for size in np.unique(sizes[:, axis]):
            same = sizes[:, axis] == size
            taps[same, axis, :size] = gaussian(deviations[same, axis], int(size))
    numbers[blurred, ROOM_AT] = (blurred.cumsum(axis=1) - 1)[blurred]
    numbers[blurred, TAPS_AT] = np.arange(len(sizes))
    return rows, taps
