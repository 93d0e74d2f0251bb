"""The Triton kernels, without a GPU: the results of their compiled code, emulated, and how they compile for GPUs.

This cannot show what tests/loading/test_gpu.py looks at: that ptxas and a GPU do the same, nor how fast.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted import assert_compiles, assert_emulates, needs_triton
from places import ROOT

from shardio.augment import resample_cuda
from shardio.augment.resample import Resampling

pytestmark = needs_triton


def test_the_compiled_kernels_give_the_bytes_of_torch_and_of_c(tmp_path: Path) -> None:
    assert_emulates("fused_resampling", tmp_path)


_COMPILE = r"""import re
import subprocess
import tempfile
import warnings
from pathlib import Path
import numpy as np
import pytest
import torch
from shardio.augment import resample_cuda
from shardio.augment.boxes import Boxes
from shardio.augment.resample import Resampling, make_spans

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"

warnings.simplefilter("error")  # as Triton's, where a launch leaves a choice to it
only_compile(resample_cuda.weigh)
compiled = only_compile(resample_cuda.resample)


def compile(capability, shape, size, *how):
    driver.capability = capability
    images = torch.zeros(1, *shape, dtype=torch.uint8).permute(0, 3, 1, 2)
    whole = Boxes.whole(1, *shape[:2])
    spans = make_spans(whole, whole, *shape[:2])
    resample_cuda.resample_fused(images, spans, np.zeros(1, bool), Resampling(size, *how))
    return compiled[-1]


def inner_loop(made):
    # Names of the machine's instructions in the shortest loop that reads.
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        text = subprocess.run([NVDISASM, "-c", file.name], capture_output=True, text=True, check=True).stdout
    assert not {"STL", "LDL"} & set(re.findall(r"\b[A-Z]{3}\b", text)), "registers are spilled"
    found = re.findall(r"\n\.(L_x_\d+):\n((?:(?!\.L_x_\d+:).)*?BRA `\(\.\1\))", text, re.DOTALL)
    loops = [re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\d+ +)?(\w+)", body) for _, body in found]
    return min((loop for loop in loops if "LDG" in loop), key=len)


def registers(made):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [NVDISASM.with_name("cuobjdump"), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", text)[1])


def compile_packed(capability, shape, size, *how):
    driver.capability = capability
    windows, numbers = torch.zeros(100, dtype=torch.uint8), torch.zeros(1, 9, dtype=torch.float64)
    places = torch.zeros(1, 2, dtype=torch.int64)
    resample_cuda.resample_packed(windows, numbers, places, shape, Resampling(size, *how))
    return compiled[-1]


usual = ("bilinear", True, ([0.5] * 3, [0.5] * 3), torch.bfloat16)
for capability in (80, 90):
    made = compile(capability, (256, 256, 3), (224, 224), *usual)
    # Neither sizes nor the alignment of lines are compiled in: other sizes of as many taps are the same kernel.
    assert compile(capability, (250, 301, 3), (223, 208), *usual) is made
# The dearest other ways: any number of taps, and the edge repeated.
compile(90, (600, 512, 1), (1, 16), "bicubic", True, None, None)
compile(80, (64, 64, 3), (97, 97), "bicubic", False, None, torch.float16)

# The loop over stored lines takes most of the time. A thread has eight lanes, and three pixels for each: they are
# loaded, multiplied and added. So are the weights of four output lines. Shared memory is not needed, and all else
# was done before the loop.
loop, lanes = inner_loop(made), 8
assert loop.count("LDG") == 3 * lanes + 4, loop
assert not {"LDS", "STS", "BAR", "MUFU"} & set(loop), loop
assert len(loop) <= 22 * lanes, len(loop)
# That windows are read costs an addition for each lane in the loop.
assert len(inner_loop(compile_packed(90, (256, 256, 3), (224, 224), *usual))) <= len(loop) + lanes
# So that sixteen programs run on a multiprocessor at a time.
assert made.metadata.num_warps == 1 and registers(made) <= 128, registers(made)
print("compiled")
"""


def test_kernels_join_no_conditions() -> None:
    """Triton before 3.4 compiles no `and` of plain bools, such as comparisons of types. Its interpreter takes them."""
    kernels = [
        function
        for path in sorted((ROOT / "shardio" / "augment").glob("*_cuda.py"))
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef) and "triton.jit" in " ".join(map(ast.unparse, function.decorator_list))
    ]
    assert len(kernels) > 10
    joined = [node for kernel in kernels for node in ast.walk(kernel) if isinstance(node, ast.BoolOp)]
    assert list(map(ast.unparse, joined)) == []


def test_the_kernel_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    assert_compiles(_COMPILE, tmp_path)


def test_as_many_pixels_are_read_as_the_filter_reaches() -> None:
    def taps(width: int, side: int, interpolation: Any, antialias: bool) -> int:
        return resample_cuda._most_taps(width, side, Resampling((8, side), interpolation, antialias))

    assert [taps(256, size, "bilinear", True) for size in (256, 224, 171, 128, 112)] == [2, 3, 3, 4, 5]
    assert [taps(256, size, "bicubic", True) for size in (300, 224, 128)] == [4, 5, 8]
    assert taps(3, 1, "bicubic", True) == 3
    assert [taps(256, 16, "bilinear", False), taps(1, 16, "bicubic", False)] == [2, 1]


def test_windows_are_compared_where_pictures_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resample_cuda, "is_trusted", lambda *_: True)

    def fits(height: int, width: int, size: tuple[int, int] = (224, 224), channels: int = 3) -> bool:
        images = torch.empty((3, channels, height, width), dtype=torch.uint8, device="meta")
        return resample_cuda.are_kernels_trusted(torch.device("cuda"), images, Resampling(size), list, packed=True)

    assert fits(256, 256)
    assert fits(1, 100_000)
    assert not fits(4, 4, channels=65)
    assert not fits(1 << 15, 1 << 15)
    assert not fits(4, 4, (1 << 15, 1 << 15))
