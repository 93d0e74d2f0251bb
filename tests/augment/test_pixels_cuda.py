"""The Triton kernels of steps, without a GPU: their results interpreted, and compiled and emulated.

This cannot show what tests/loading/test_gpu.py looks at: that ptxas and a GPU do the same, nor how fast.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from interpreted import assert_compiles, assert_emulates, assert_interprets, needs_triton

from shardio.augment import Compose, Normalize, RandomInvert, ToDtype, pixels_cuda
from shardio.augment.batch import fused
from shardio.augment.steps import Op, Step, Steps


@needs_triton
def test_the_interpreted_kernels_do_what_torch_does() -> None:
    assert_interprets("fused_steps")


@needs_triton
def test_the_compiled_kernels_do_what_torch_does(tmp_path: Path) -> None:
    assert_emulates("fused_steps", tmp_path)


_COMPILE = """\
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from shardio.augment import steps_cuda as kernels

TYPES = {
    "pixels": "*u8", "rows": "*fp64", "tables": "*u8", "room": "*fp32", "taps": "*fp32",
    "affine": "*fp32", "height": "i32", "width": "i32", "most_taps": "i32", "size": "i32",
}


def check(kernel, constants, **types):
    types = {**TYPES, **types}
    source = ASTSource(kernel, {name: types.get(name, "constexpr") for name in kernel.arg_names}, constants)
    for capability in (80, 90):
        target = GPUTarget("cuda", capability, 32)
        assert compile(source, target=target, options={"enable_fp_fusion": False}).asm["cubin"]


shape = {"ROW": 14, "CHANNELS": 3, "PADDED": 4, "BLOCK": 128}
check(kernels.measure, {"ROW": 14, "CHANNELS": 3, "BLOCK": 2048})
check(kernels.blur_lines, shape)
check(kernels.step, {**shape, "STEPS": True, "NORMALIZE": True}, out="*bf16")
# Where there is no table, no blur or no step, other pictures stand for what is not read.
one = {"ROW": 12, "CHANNELS": 1, "PADDED": 1, "BLOCK": 512}
unread = {"tables": "*u8", "room": "*u8", "taps": "*u8"}
check(kernels.step, {**one, "STEPS": True, "NORMALIZE": False}, out="*u8", **unread, affine="*u8")
check(kernels.step, {**shape, "STEPS": False, "NORMALIZE": True}, out="*fp16", **unread, rows="*u8")
print("compiled")
"""


@needs_triton
def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    assert_compiles(_COMPILE, tmp_path)


def test_images_on_the_cpu_are_not_for_the_kernels() -> None:
    images = torch.zeros(1, 3, 4, 4, dtype=torch.uint8)
    assert not pixels_cuda.can_fuse(images)
    assert fused(images, (Step.of(1, 3, Op.INVERT),), None, None) is None


@pytest.mark.parametrize(
    ("transform", "ops"),
    [
        (Compose([Normalize(0.5, 0.5), ToDtype(torch.float16)]), []),
        (Compose([RandomInvert(1.0), Normalize(0.5, 0.5), ToDtype(torch.float16)]), [Op.INVERT]),
    ],
    ids=["normalised", "stepped"],
)
def test_steps_normalising_and_casting_are_asked_for_at_once(
    transform: Compose, ops: list[Op], monkeypatch: pytest.MonkeyPatch
) -> None:
    images = torch.randint(0, 256, (2, 3, 5, 4), dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    asked = []

    def ask(images: torch.Tensor, steps: Steps, *how: object) -> torch.Tensor:
        asked.append(([Op(int(step.codes[0])) for step in steps], *how))
        return images

    expected = images.clone()
    monkeypatch.setattr("shardio.augment.batch.fused", ask)
    found = transform(images)
    assert asked == [(ops, ((0.5,) * 3, (0.5,) * 3), torch.float16)]
    assert found is images
    assert torch.equal(images, expected)
    # Torch's operations would keep other memory formats; the kernels do not.
    transform(images.contiguous())
    assert len(asked) == (2 if ops else 1)


def test_what_the_kernels_do_not_take_is_left_to_torch() -> None:
    def fits(*shape: int, dtype: torch.dtype = torch.uint8) -> bool:
        return pixels_cuda._fits(torch.empty(1, dtype=dtype, device="meta").expand(shape))

    assert fits(256, 3, 224, 224)
    assert fits(1, 64, 1, 1)
    assert not fits(1, 65, 1, 1)
    assert not fits(0, 3, 4, 4)
    assert not fits(1, 3, 4, 4, dtype=torch.float32)
    assert not fits(1, 3, 1 << 15, 1 << 15)
    assert not fits(1 << 31, 3, 1, 1)


def test_tables_that_follow_each_other_are_one_and_each_picture_begins_at_once() -> None:
    codes = [[Op.INVERT, Op.NOTHING], [Op.NOTHING, Op.NOTHING], [Op.SOLARIZE_ADD, Op.MIRROR], [Op.EQUALIZE, Op.NOTHING]]
    steps = tuple(Step.of(2, 1, np.array(some, np.uint8), 3.0, 256.0) for some in codes)
    made, values, levels = pixels_cuda._tables_of(steps, 2, 1)
    np.testing.assert_array_equal(made, [[Op.INVERT, Op.MIRROR], [Op.EQUALIZE, Op.NOTHING]])
    np.testing.assert_array_equal(levels[int(values[0, 0, 0]), 0], np.minimum(255 - np.arange(256) + 3, 255))
    assert values[0, 1, 0] == -1
    assert values[1, 0, 0] >= 0


def test_what_is_tried_first_is_what_the_batch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe launches the kernels of its batch, in the same variants, on one small picture."""
    tried = []

    def run(images: torch.Tensor, steps: Steps, **how: object) -> None:
        tried.append((images.shape[1], {Op(int(step.codes[0])) for step in steps}, how))
        raise RuntimeError("no compiler")

    monkeypatch.setattr(pixels_cuda, "run_steps_fused", run)
    works = pixels_cuda._works.__wrapped__
    device = torch.device("cpu")
    with pytest.warns(RuntimeWarning, match="Triton does not work on cpu.*no compiler"):
        assert not works(device, 3, False, False, False, True, torch.bfloat16)
    with pytest.warns(RuntimeWarning, match="steps are done by torch"):
        assert not works(device, 1, True, True, True, False, torch.uint8)
    assert tried == [
        (3, set(), {"statistics": ((0.5,) * 3, (0.5,) * 3), "dtype": torch.bfloat16}),
        (1, {Op.MIRROR, Op.EQUALIZE, Op.BLUR}, {"statistics": None, "dtype": torch.uint8}),
    ]
