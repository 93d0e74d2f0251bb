"""Faults in kernels, which `tools/check_ptx.py` finds in the emulator."""

from __future__ import annotations

from pathlib import Path

from interpreted import assert_prints, needs_triton

pytestmark = needs_triton


_FAULTY = """\
import check_ptx
import fused_resampling
import numpy as np
from pictures import as_batch
from ptx import EmulationError, emulation
from shardio.augment.pixels_cuda import run_steps_fused
from shardio.augment.steps import Op, Step

emulation.emulate(90)


def error_of(function, *arguments):
    try:
        function(*arguments)
    except EmulationError as error:
        return type(error).__name__


print(error_of(check_ptx.fuzz_windows, np.random.default_rng(1)), end=" ")
fused_resampling.margin_of = lambda width, channels: 0
print(error_of(check_ptx.fuzz_windows, np.random.default_rng(1)), end=" ")

parse = emulation._parsed
emulation._parsed = lambda ptx: parse(ptx.replace("bar.sync", "bar.warp.sync -1; //"))
images = as_batch(np.zeros((2, 16, 24, 3), np.uint8))
print(error_of(run_steps_fused, images, (Step.of(2, 3, Op.EQUALIZE),)))
"""


def test_windows_without_margins_and_kernels_without_barriers_are_found(tmp_path: Path) -> None:
    assert_prints(_FAULTY, "None OutOfBounds Race", TRITON_CACHE_DIR=str(tmp_path))


_ENDLESS = """\
import types

import check_ptx

emulator = types.SimpleNamespace(num_launches=5)


def launch(rng):
    emulator.num_launches += 2


check_ptx.fuzz_resampling = check_ptx.fuzz_windows = check_ptx.fuzz_steps = launch
print(check_ptx.fuzz(emulator, 7, [90], 0), emulator.num_launches)
"""


def test_random_cases_end_without_a_terminal(tmp_path: Path) -> None:
    assert_prints(_ENDLESS, "4 13", TRITON_CACHE_DIR=str(tmp_path))
