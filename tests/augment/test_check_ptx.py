"""The check of emulated kernels on images of random sizes, in its short form, and faults that it would find."""

from __future__ import annotations

import re
from pathlib import Path

from command import run_python
from interpreted import assert_prints, needs_triton
from places import ROOT

pytestmark = needs_triton


def test_images_of_random_sizes_are_resampled_and_changed_as_by_torch() -> None:
    run = run_python(str(ROOT / "tools" / "check_ptx.py"), "--fuzz", "12", "--capabilities", "90")
    assert run.returncode == 0, run.stderr
    assert re.match(r"fuzz: 3 cases, \d\d launches, all as torch, \d+ s, seed 0\n$", run.stdout)


_FAULTY = """\
from dataclasses import replace
import numpy as np
from ptx import EmulationError, emulation
from shardio.augment import Compose
from shardio.augment.boxes import Draws
from shardio.augment.steps import Op, Step
from shardio.augment.pixels_cuda import run_steps_fused
from pictures import as_batch
import fused_resampling

emulation.emulate(90)


def error_of(function, *arguments):
    try:
        function(*arguments)
    except EmulationError as error:
        return type(error).__name__


images = np.zeros((2, 16, 24, 3), np.uint8)
fused_resampling.margin_of = lambda width, channels: 0
windows = images, Compose(fused_resampling.CHAINS[0]), Draws(1, 2, np.arange(2)), 0
print(error_of(fused_resampling.check_windows, *windows), end=" ")

parse = emulation._parsed
emulation._parsed = lambda ptx: parse(ptx.replace("bar.sync", "bar.warp.sync -1; //"))
print(error_of(run_steps_fused, as_batch(images), (Step.of(2, 3, Op.EQUALIZE),)))
"""


def test_windows_without_margins_and_kernels_without_barriers_are_found(tmp_path: Path) -> None:
    assert_prints(_FAULTY, "OutOfBounds Race", TRITON_CACHE_DIR=str(tmp_path))
