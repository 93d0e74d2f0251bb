"""The Triton kernels of steps, without a GPU: the results of their compiled code, emulated.

This cannot show what tests/loading/test_gpu.py looks at: that ptxas and a GPU do the same, nor how fast.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from interpreted import assert_compiles, assert_emulates, needs_triton

from shardio.augment import Compose, Normalize, RandomInvert, ToDtype, pixels_cuda
from shardio.augment.batch import fused
from shardio.augment.steps import Op, Step, Steps


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
one = {"ROW": 12, "CHANNELS": 1, "PADDED": 1, "BLOCK": 512}
check(kernels.step, {**one, "STEPS": True, "NORMALIZE": False}, out="*u8")
check(kernels.step, {**shape, "STEPS": False, "NORMALIZE": True}, out="*fp16")
print("compiled")
"""


@needs_triton
def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    assert_compiles(_COMPILE, tmp_path)


_VARIANTS = """\
import numpy as np
import torch
from shardio.augment import pixels_cuda
from shardio.augment.steps import Op, Step

compiled = [only_compile(kernel) for kernel in (pixels_cuda.measure, pixels_cuda.blur_lines, pixels_cuda.step)]
sent, to_device = [], pixels_cuda.to_device


def note(values, device):
    sent.append(len(values))
    return to_device(values, device)


pixels_cuda.to_device = note
statistics = ((0.5,) * 3, (0.5,) * 3)
# Sizes, which may be 1 or multiples of 16, and what is drawn for a batch.
for count, size, ops in (
    (16, (224, 224), [Op.BLUR, Op.EQUALIZE, Op.INVERT]),
    (7, (200, 200), [Op.BLUR, Op.EQUALIZE, Op.MIRROR]),
    (1, (1, 1), [Op.EQUALIZE, Op.FLIP]),
    (15, (33, 1), [Op.INVERT, Op.MIRROR]),
):
    images = torch.zeros(count, *size, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    steps = tuple(Step.of(count, 3, op, *([23, 23, 1.0, 1.0] if op is Op.BLUR else [])) for op in ops)
    pixels_cuda.run_steps_fused(images, steps, statistics=statistics, dtype=torch.bfloat16)
# The last launch normalizes, and has a dtype of its own.
assert [len(set(map(id, kernels))) for kernels in compiled] == [1, 1, 2], compiled
assert len(sent) == 4, sent
print("compiled")
"""


@needs_triton
def test_a_batch_is_sent_at_once_and_its_size_and_draws_compile_no_other_kernel(tmp_path: Path) -> None:
    assert_compiles(_VARIANTS, tmp_path)


def test_images_on_the_cpu_are_not_for_the_kernels() -> None:
    images = torch.zeros(1, 3, 4, 4, dtype=torch.uint8)
    assert fused(images, (Step.of(1, 3, Op.INVERT),), None, None) is None


@pytest.mark.parametrize(
    ("transform", "ops"),
    [
        (Compose([Normalize(0.5, 0.5), ToDtype(torch.float16)]), []),
        (Compose([RandomInvert(1.0), Normalize(0.5, 0.5), ToDtype(torch.float16)]), [Op.INVERT]),
    ],
    ids=["normalized", "stepped"],
)
def test_steps_normalizing_and_casting_are_asked_for_at_once(
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


def test_images_that_are_compared_have_the_operations_of_all() -> None:
    codes = np.zeros((2, 40), np.uint8)
    codes[0, 11:36] = Op.INVERT
    codes[1, [20, 38]] = Op.BLUR, Op.EQUALIZE
    steps = tuple(Step.of(40, 3, some) for some in codes)
    assert pixels_cuda._some_with_most_operations(steps, 40) == [38, 20, 0, 11, 1, 2, 3, 4]
    assert pixels_cuda._some_with_most_operations((), 3) == [0, 1, 2]


def test_tables_that_follow_each_other_are_one_and_each_picture_begins_at_once() -> None:
    codes = [[Op.INVERT, Op.NOTHING], [Op.NOTHING, Op.NOTHING], [Op.SOLARIZE_ADD, Op.MIRROR], [Op.EQUALIZE, Op.NOTHING]]
    steps = tuple(Step.of(2, 1, np.array(some, np.uint8), 3.0, 256.0) for some in codes)
    made, values, levels = pixels_cuda._tables_of(steps, 2, 1)
    np.testing.assert_array_equal(made, [[Op.INVERT, Op.MIRROR], [Op.EQUALIZE, Op.NOTHING]])
    np.testing.assert_array_equal(levels[int(values[0, 0, 0]), 0], np.minimum(255 - np.arange(256) + 3, 255))
    assert values[0, 1, 0] == -1
    assert values[1, 0, 0] >= 0
