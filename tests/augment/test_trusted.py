"""Kernels are compared with torch's operations before they are used: right ones are used, and wrong ones are noticed.

Kernels that stand in for Triton's do this here without a GPU; at the end, Triton's interpreter runs the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import PATCH_ONCE, assert_prints, needs_triton
from pictures import as_batch, random_pictures

from shardio.augment import (
    ColorJitter,
    Compose,
    HorizontalFlip,
    Normalize,
    RandomResizedCrop,
    pixels_cuda,
    resample_cuda,
    trusted,
)
from shardio.augment.chain import Transform
from shardio.augment.pixels import run_steps_by_torch
from shardio.augment.resample import normalized, resample_by_torch
from shardio.augment.trusted import KINDS, MOST_COMPARED, Compared, Signature, chosen_on, is_trusted

CPU = torch.device("cpu")
STATISTICS = ((0.4, 0.5, 0.45), (0.2, 0.25, 0.3))
GRAY = torch.randint(0, 200, (4, 3, 10, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel was used yet, and Triton seems to be here."""
    monkeypatch.setattr(trusted, "_chosen", {})
    monkeypatch.setattr(trusted, "triton", SimpleNamespace(__version__="3.99"))


def of(variant: int = 0) -> Signature:
    return "resample", CPU, (variant,)


class Asked:
    """A comparison with what `kernels` return or raise, one after the other, that counts its calls."""

    def __init__(self, *kernels: torch.Tensor | Exception, expected: torch.Tensor = GRAY) -> None:
        self.kernels = list(kernels)
        self.expected = expected
        self.compared = 0

    def __call__(self) -> list[Compared]:
        self.compared += 1
        return [(self.expected, self._run)]

    def _run(self) -> torch.Tensor:
        made = self.kernels.pop(0)
        if isinstance(made, Exception):
            raise made
        return made


def test_a_kernel_that_gives_torch_s_pixels_is_compared_once() -> None:
    asked = Asked(GRAY.clone())
    assert [is_trusted(of(), asked, None) for _ in range(3)] == [True] * 3
    assert asked.compared == 1
    assert is_trusted(of(1), other := Asked(GRAY.clone()), None)
    assert other.compared == 1


@pytest.mark.parametrize(
    ("levels", "share", "right"), [(1, 0.015, True), (1, 0.03, False), (2, 0.001, False), (50, 1.0, False)]
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float16, torch.bfloat16])
def test_a_few_values_may_be_one_gray_level_apart(levels: int, share: float, right: bool, dtype: torch.dtype) -> None:
    wrong = GRAY.clone()
    some = torch.linspace(0, wrong.numel() - 1, max(int(share * wrong.numel()), 1)).long()
    wrong.view(-1)[some] += levels
    statistics = None if dtype == torch.uint8 else STATISTICS
    asked = Asked(normalized(wrong, statistics, dtype), expected=normalized(GRAY, statistics, dtype))
    if right:
        assert is_trusted(of(), asked, statistics)
    else:
        with pytest.warns(RuntimeWarning, match=r"'resample' of Triton 3\.99 on cpu differs .* [\d.]+ gray levels"):
            assert not is_trusted(of(), asked, statistics)
    assert is_trusted(of(), asked, statistics) is right


@pytest.mark.parametrize(
    "made",
    [GRAY[:3], GRAY.float(), torch.full(GRAY.shape, float("nan"))],
    ids=["another shape", "another dtype", "no numbers"],
)
def test_what_is_no_picture_is_noticed(made: torch.Tensor) -> None:
    expected = GRAY.float() if made.isnan().any() else GRAY
    with pytest.warns(RuntimeWarning, match="differs from torch's operations"):
        assert not is_trusted(of(), Asked(made, expected=expected), None)


def test_a_kernel_that_fails_is_replaced_with_one_warning() -> None:
    asked = Asked(RuntimeError("no C compiler"))
    with pytest.warns(
        RuntimeWarning, match=r"Triton 3\.99 on cpu failed: RuntimeError: no C compiler\. Torch's"
    ) as seen:
        assert not is_trusted(of(), asked, None)
    assert len(seen) == 1
    assert not is_trusted(of(), asked, None)
    assert asked.compared == 1


def test_a_file_of_the_compilation_cache_may_be_missing_once() -> None:
    assert is_trusted(of(), Asked(FileNotFoundError("tmp.pid"), GRAY.clone()), None)
    with pytest.warns(RuntimeWarning, match="OSError: stale; set TRITON_CACHE_DIR"):
        assert not is_trusted(of(1), Asked(OSError("busy"), OSError("stale")), None)


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("CUDA out of memory. Tried"), MemoryError("host")])
def test_a_device_without_memory_is_asked_again(error: Exception) -> None:
    asked = Asked(error, GRAY.clone())
    assert [is_trusted(of(), asked, None) for _ in range(3)] == [False, True, True]
    assert asked.compared == 2


def test_without_triton_torch_is_used_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trusted, "triton", None)
    assert not is_trusted(of(), asked := Asked(), None)
    assert asked.compared == 0
    assert chosen_on(CPU) == {"resample": "torch", "pixels": "torch"}


def test_what_was_chosen_is_told_for_each_device() -> None:
    assert chosen_on(CPU) == {"resample": None, "pixels": None}
    is_trusted(of(), Asked(GRAY.clone()), None)
    assert chosen_on(CPU) == {"resample": "Triton", "pixels": None}
    with pytest.warns(RuntimeWarning):
        is_trusted(of(1), Asked(255 - GRAY), None)
    assert chosen_on(CPU) == {"resample": "Triton, torch", "pixels": None}
    assert chosen_on(torch.device("cuda", 1)) == {"resample": None, "pixels": None}


# Transforms, of images that say that they are on CUDA.


class OnCuda(torch.Tensor):
    is_cuda = property(lambda self: True)  # type: ignore[assignment]


RESIZED = Compose([RandomResizedCrop(24), HorizontalFlip(), Normalize("imagenet")])
CHANGED = Compose([ColorJitter(0.4, 0.4, 0.4, 0.1), Normalize("imagenet")])
BOTH = pytest.mark.parametrize(("transform", "kind"), [(RESIZED, "resample"), (CHANGED, "pixels")], ids=KINDS)
PICTURES = as_batch(random_pictures(np.random.default_rng(0), 12, 40, 36))


def stand_in(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
    """Has torch make what kernels would make, and then `spoil` it. Returns a list of the images of each launch."""
    launched: list[int] = []

    def note(images: torch.Tensor) -> torch.Tensor:
        launched.append(len(images))
        return images.as_subclass(torch.Tensor)

    def resample(images: torch.Tensor, *how: Any) -> torch.Tensor:
        return spoil(resample_by_torch(note(images), *how))

    def run(images: torch.Tensor, steps: Any, statistics: Any = None, dtype: Any = None) -> torch.Tensor:
        return spoil(normalized(run_steps_by_torch(note(images), steps), statistics, dtype, native=False))

    monkeypatch.setattr(resample_cuda, "resample_fused", resample)
    monkeypatch.setattr(pixels_cuda, "run_steps_fused", run)
    return launched


@BOTH
def test_a_transform_compares_a_few_images_and_then_runs_the_kernel(
    transform: Transform, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = stand_in(monkeypatch, lambda made: made)
    for seed in range(3):
        found, expected = transform(PICTURES.as_subclass(OnCuda), seed=seed), transform(PICTURES, seed=seed)
        assert torch.allclose(found, expected, atol=1 / (255 * 0.22))  # type: ignore[arg-type]
    assert launched == [MOST_COMPARED] * (len(launched) - 3) + [len(PICTURES)] * 3
    assert len(launched) > 3
    assert chosen_on(CPU)[kind] == "Triton"


@BOTH
def test_a_transform_with_a_wrong_kernel_gives_torch_s_pixels(
    transform: Transform, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = stand_in(monkeypatch, lambda made: made.flip(0))
    with pytest.warns(RuntimeWarning, match=f"the kernel '{kind}' of Triton"):
        found = transform(PICTURES.as_subclass(OnCuda), seed=1)
    assert torch.equal(found.as_subclass(torch.Tensor), transform(PICTURES, seed=1))  # type: ignore[union-attr,arg-type]
    assert set(launched) == {MOST_COMPARED}
    before = len(launched)
    transform(PICTURES.as_subclass(OnCuda), seed=1)
    assert len(launched) == before
    assert chosen_on(CPU)[kind] == "torch"


_CHECK = """\
import warnings
import numpy as np
import torch
from drawn_steps import drawn_step, pictures
from pictures import as_batch
from shardio.augment import Compose, HorizontalFlip, Normalize, RandomResizedCrop, ToDtype, resample_cuda
from shardio.augment.boxes import Boxes, Draws
from shardio.augment.cut import SplitTransform
from shardio.augment.pixels_cuda import run_steps_if_trusted
from shardio.augment.resample import Resampling, resample
from shardio.augment.resample_cuda import resample_if_trusted
from shardio.augment.steps import Op
from shardio.augment.trusted import chosen_on

warnings.simplefilter("error")
rng = np.random.default_rng(0)
cpu, size, count = torch.device("cpu"), (11, 9), 8  # as many as are compared
statistics = ((0.4, 0.5, 0.45), (0.2, 0.25, 0.3))
images = as_batch(pictures(rng, count, *size, 3))

# Each operation is compared by itself, in programs where a difference of one gray level would grow.
codes = rng.permutation(np.arange(3 * count) % len(Op)).astype(np.uint8).reshape(3, count)
steps = tuple(drawn_step(rng, some, size, 3) for some in codes)
assert run_steps_if_trusted(images, steps, statistics, torch.float16) is not None
images, flips = images[:3], np.arange(3) == 1
box = Boxes(*(np.full(3, number) for number in (1.5, 0.25, 7.3, 8.5)))
for dtype in (torch.uint8, torch.float32):
    assert resample_if_trusted(images, box, box, flips, Resampling((5, 6), dtype=dtype)) is not None
assert chosen_on(cpu) == {"resample": "Triton", "pixels": "Triton"}

chain = Compose([RandomResizedCrop(6), HorizontalFlip(), Normalize("imagenet"), ToDtype(torch.float16)])
cut = SplitTransform.of(chain).cut(Draws(0, 0, np.arange(3)), (*size, 3))
assert cut.works_on(cpu)

# The same kernel, wrong: it makes one picture from another's box.
right = resample_cuda.parameters_of
resample_cuda.parameters_of = lambda *how: np.roll(right(*how), 1, axis=0)
moved = Boxes(np.arange(3.0), box.lefts, box.heights, box.widths)
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as seen:
    assert resample_if_trusted(images, moved, moved, flips, Resampling((5, 6), "bicubic")) is None
    assert not SplitTransform.of(RandomResizedCrop(6)).cut(Draws(0, 0, np.arange(3)), (*size, 3)).works_on(cpu)
assert ["the kernel 'resample' of Triton" in str(warning.message) for warning in seen] == [True, True]
assert chosen_on(cpu)["resample"] == "Triton, torch"
print("equal")
"""


@needs_triton
def test_the_kernels_themselves_are_trusted_and_wrong_ones_are_not() -> None:
    assert_prints(f"{PATCH_ONCE}\n{_CHECK}", "equal", TRITON_INTERPRET="1")
