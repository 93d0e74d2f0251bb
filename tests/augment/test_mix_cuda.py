"""The Triton kernel of Mixup and CutMix, without a GPU: its results in Triton's interpreter, and that it compiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import assert_compiles, assert_interprets, needs_triton

from shardio.augment import Compose, CutMix, Mixup, Normalize, RandomInvert, ToDtype, mix_cuda
from shardio.augment.chain import Transform

_CHECK = """\
import numpy as np
import torch
from shardio.augment import CutMix, Mixup
from shardio.augment.mix_cuda import mixed_fused
from shardio.augment.resample import normalized

rng = np.random.default_rng(0)
statistics = ([0.4, 0.5, 0.45], [0.2, 0.25, 0.3])
# More than one program for a picture, and pictures that begin anywhere.
stored = torch.from_numpy(rng.integers(0, 256, (4, 19, 23, 3), np.uint8)).permute(0, 3, 1, 2)
shares = np.array([0.0, 0.3, 0.8, 1.0])
for partner in ("roll", "flip"):
    for mix in (Mixup(10, partner=partner), CutMix(10, partner=partner)):
        numbers, _ = mix._numbers((19, 23), shares, rng.random((2, 4)))
        for images, how, dtype in (
            (stored, statistics, torch.float16),
            (stored, statistics, None),
            (stored, None, torch.float32),
            (normalized(stored, statistics).half(), None, None),
            *([(stored, None, None)] if isinstance(mix, CutMix) else []),
        ):
            finished = images if how is None else normalized(images, how)
            finished = finished if dtype is None else finished.to(dtype)
            expected = mix._mix(finished, mix._partners(finished), numbers)
            found = mixed_fused(images, numbers.astype(np.float32), partner == "flip", how, dtype)
            assert found.dtype == expected.dtype and found.is_contiguous(memory_format=torch.channels_last)
            # A last digit of the sum, which is exact where nothing is added.
            digit = 0 if isinstance(mix, CutMix) else 2**-10 if found.dtype == torch.float16 else 2**-20
            torch.testing.assert_close(found, expected, rtol=digit, atol=digit)
print("equal")
"""


@needs_triton
def test_the_interpreted_kernel_mixes_as_torch_does() -> None:
    assert_interprets(_CHECK)


_COMPILE = """\
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from shardio.augment.mix_cuda import _mix

names = ("CHANNELS", "CUTS", "FLIPS", "NORMALIZE", "BLOCK")
for stored, out, *flags in (("u8", "bf16", False, True, True), ("u8", "u8", True, False, False)):
    constants = dict(zip(names, [3, *flags, 1024], strict=True))
    types = {"images": f"*{stored}", "out": f"*{out}", "numbers": "*fp32", "affine": "*fp32"}
    types |= {"pictures": "i32", "size": "i32", "width": "i32", **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(_mix, types, constants)
    for capability in (80, 90):
        target = GPUTarget("cuda", capability, 32)
        assert compile(source, target=target, options={"enable_fp_fusion": False}).asm["cubin"]
print("compiled")
"""


@needs_triton
def test_the_kernel_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    assert_compiles(_COMPILE, tmp_path)


@pytest.mark.parametrize(
    ("transform", "normalised"),
    [
        (Compose([Normalize(0.5, 0.5), ToDtype(torch.float16), Mixup(4, partner="flip")]), True),
        (Compose([RandomInvert(1.0), Normalize(0.5, 0.5), ToDtype(torch.float16), CutMix(4)]), False),
    ],
    ids=["pixels as stored", "after steps"],
)
def test_the_kernel_is_asked_to_normalise_what_was_not_touched(
    transform: Transform, normalised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def mixed(images: torch.Tensor, *how: Any) -> torch.Tensor:
        asked.append((images.dtype, *how[1:]))
        return torch.zeros(1)

    class OnCuda(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(mix_cuda, "can_mix", lambda *_: True)
    monkeypatch.setattr(mix_cuda, "mixed_fused", mixed)
    monkeypatch.setattr("shardio.augment.batch.fused", lambda images, *_: images.half().as_subclass(OnCuda))
    images = torch.zeros(3, 2, 5, 4, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    found, labels = transform(images.as_subclass(OnCuda), torch.arange(3))
    assert torch.equal(found, torch.zeros(1))
    assert labels.shape == (3, 4)
    statistics = ((0.5,) * 2, (0.5,) * 2)
    assert asked == [
        (torch.uint8, True, statistics, torch.float16) if normalised else (torch.float16, False, None, None)
    ]


def test_images_on_the_cpu_are_not_for_the_kernel() -> None:
    images = torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert not mix_cuda.can_mix(images, np.ones((2, 1), np.float32), False, None, None)
