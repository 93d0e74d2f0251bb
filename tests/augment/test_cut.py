"""A transform in two parts gives the pixels of the whole, of what its cut says that it sees and of nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transforms import ALL

from shardio.augment import (
    AlternatingFlip,
    CenterCrop,
    ColorJitter,
    Compose,
    CutMix,
    HorizontalFlip,
    Mixup,
    Normalize,
    Pad,
    RandomApply,
    RandomChoice,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    RandomRotation,
    Resize,
    ToDtype,
    Views,
    recipe,
)
from shardio.augment.batch import Images
from shardio.augment.boxes import Draws
from shardio.augment.chain import Container, Transform
from shardio.augment.cut import SplitTransform
from shardio.augment.recipes import RECIPES
from shardio.kernels.built import _resample

COUNT = 9
SPLIT: list[Transform] = [
    RandomResizedCrop(24),
    RandomResizedCrop((40, 17), scale=(0.01, 0.02)),
    Compose([RandomResizedCrop(24, interpolation="bicubic"), HorizontalFlip(), Normalize("imagenet")]),
    Compose([RandomResizedCrop(24, antialias=False), AlternatingFlip(), ToDtype(torch.float16)]),
    Compose([HorizontalFlip(), RandomCrop(16), ToDtype(torch.float32, scale=True)]),
    Compose([Resize(30), CenterCrop(24), Normalize("imagenet"), ToDtype(torch.bfloat16)]),
    Compose([Resize((70, 65), antialias=False), HorizontalFlip(), RandomCrop(20), Normalize(0.5, 0.2)]),
    Compose([CenterCrop(20), Resize((31, 9))]),
    Compose([RandomResizedCrop(24, interpolation="random"), HorizontalFlip(), Normalize("imagenet")]),
    Compose([Resize((9, 70), "random", antialias=False), RandomCrop(8)]),
    Compose([RandomResizedCrop(24), ColorJitter(0.4, 0.4, 0.4), HorizontalFlip(), RandomErasing(), Normalize(0, 1)]),
    Compose(
        [RandomResizedCrop(24), RandomApply([RandomRotation(9)]), Normalize(), RandomChoice([Mixup(5), CutMix(5)])]
    ),
    Compose([RandomResizedCrop(24), Normalize("imagenet"), RandomErasing(0.9, value="random")]),
    Compose([RandomResizedCrop(24), HorizontalFlip(), Views([ColorJitter(0.4), Resize(9)])]),
]
WHOLE: list[Transform] = [
    HorizontalFlip(),
    Normalize("imagenet"),
    Views([RandomResizedCrop(24)] * 2),
    # The filter would see the border, or the first result.
    Compose([Pad(2), RandomResizedCrop(24)]),
    RandomCrop(16, padding=2),
    RandomCrop(16, pad_if_needed=True),
    CenterCrop(16, "edge"),
    Compose([Resize(30), RandomResizedCrop(24)]),
    # A crop that may become one with those before.
    Compose([RandomResizedCrop(24), ColorJitter(0.1), CenterCrop(20)]),
    Compose([RandomResizedCrop(24), RandomApply([CenterCrop(24)])]),
    Compose([ColorJitter(0.1), RandomResizedCrop(24)]),
    Compose([CenterCrop(24), Views([Resize(9), Resize(8)])]),
]

pytestmark = pytest.mark.skipif(_resample is None, reason="installed without the native kernels")


def stored(rng: np.random.Generator, height: int, width: int, channels: int = 3) -> NDArray[np.uint8]:
    return rng.integers(0, 256, (COUNT, height, width, channels), dtype=np.uint8)


def as_tuple(images: Images) -> tuple[torch.Tensor, ...]:
    return images if isinstance(images, tuple) else (images,)


def check(transform: Transform, pixels: NDArray[np.uint8], sizes: NDArray[np.int64] | None = None) -> float:
    """Compares both ways. Returns the share of the pixels that is seen."""
    rng = np.random.default_rng(pixels.shape[1])
    samples, labels = rng.integers(0, 1000, COUNT), torch.from_numpy(rng.integers(0, 5, COUNT))
    height, width = pixels.shape[1:3]
    masks = {} if transform.mixes else {"segments": torch.from_numpy(rng.integers(0, 9, (COUNT, height, width)))}
    arrays: dict[str, Any] = {} if transform.mixes else {"masks": masks}
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    whole = transform(images, labels, indices=samples, seed=3, epoch=2, sizes=sizes, **arrays)
    split = SplitTransform.of(transform)
    assert split is not None
    cut = split.cut(Draws(3, 2, samples), pixels.shape[1:], sizes)
    seen = [image[cut.windows.part(i)].reshape(-1) for i, image in enumerate(pixels)]
    out = np.empty((COUNT, *cut.size, cut.num_channels), cut.dtype)
    for some in (slice(0, 1), slice(1, 5), slice(5, COUNT)):
        cut.resample(np.concatenate(seen[some]), np.arange(COUNT)[some], out)
    found, targets, moved = cut.finish(torch.from_numpy(out).permute(0, 3, 1, 2), labels, **arrays)
    for one, other in zip(as_tuple(found), as_tuple(whole[0]), strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
    assert torch.equal(targets, whole[1])
    expected = {} if transform.mixes else whole[2]
    assert (moved or {}).keys() == expected.keys()
    for name, values in (moved or {}).items():
        assert all(map(torch.equal, as_tuple(values), as_tuple(expected[name])))
    return float(cut.windows.num_pixels.mean() / (height * width))


@pytest.mark.parametrize("transform", SPLIT, ids=repr)
def test_windows_alone_give_the_same_pixels(transform: Transform) -> None:
    rng = np.random.default_rng(1)
    for height, width in ((40, 50), (64, 33)):
        assert check(transform, stored(rng, height, width)) <= 1
        check(transform, stored(rng, height, width), rng.integers(40, 200, (COUNT, 2)))
    if transform == RandomResizedCrop(24):
        for channels in (1, 2, 4):
            check(transform, stored(rng, 40, 50, channels))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipes_give_the_same_pixels(name: str) -> None:
    transform = recipe(name, 112)  # which patches of 14 and of 16 pixels divide
    if isinstance(transform, Views) or name in ("deit3", "cifar-airbench"):
        assert SplitTransform.of(transform) is None
    else:
        assert check(transform, stored(np.random.default_rng(2), 160, 160)) < 0.9


def test_a_random_box_is_half_of_its_picture_and_a_window_no_larger_than_it_must_be() -> None:
    split = SplitTransform.of(RandomResizedCrop(224))
    assert split is not None
    cut = split.cut(Draws(0, 0, np.arange(20_000)), (256, 256, 3))
    assert 0.47 < cut.windows.num_pixels.mean() / 256**2 < 0.49
    boxes = cut.batch.region
    for side in ("tops", "lefts", "heights", "widths"):
        assert np.array_equal(getattr(cut.windows, side), getattr(boxes, side))


@pytest.mark.parametrize("lines", [1, 2, 16, 48])
def test_windows_of_whole_lines_give_the_same_pixels(lines: int) -> None:
    pixels, samples = stored(np.random.default_rng(4), 96, 50), np.arange(COUNT)
    transform = Compose([RandomResizedCrop(24), HorizontalFlip()])
    expected = transform(torch.from_numpy(pixels).permute(0, 3, 1, 2), seed=1, epoch=2, indices=samples)
    split = SplitTransform.of(transform)
    assert split is not None
    least = split.cut(Draws(1, 2, samples), pixels.shape[1:]).windows
    cut = split.cut(Draws(1, 2, samples), pixels.shape[1:], whole_lines=lines)
    windows, ends = cut.windows, cut.windows.tops + cut.windows.heights
    assert (windows.tops % lines == 0).all()
    assert (ends % lines == 0).all()
    assert ((least.tops - windows.tops >= 0) & (least.tops - windows.tops < lines)).all()
    assert ((ends - least.tops - least.heights >= 0) & (ends - least.tops - least.heights < lines)).all()
    assert (windows.lefts == 0).all()
    assert (windows.widths == 50).all()
    seen = np.concatenate([image[windows.part(i)].reshape(-1) for i, image in enumerate(pixels)])
    assert torch.equal(cut.resampled(torch.from_numpy(seen)), expected)


@pytest.mark.parametrize("transform", WHOLE, ids=repr)
def test_transforms_that_cannot_be_split_are_not(transform: Transform) -> None:
    assert SplitTransform.of(transform) is None


def test_whatever_neither_crops_nor_resizes_may_follow_another_transform_of_windows() -> None:
    moving = {CenterCrop, Pad, RandomCrop, RandomResizedCrop, Resize}
    for transform in ALL:
        if not isinstance(transform, Container):
            split = SplitTransform.of(Compose([CenterCrop(8), ColorJitter(0.1), transform]))
            assert (split is None) == (type(transform) in moving), transform


def test_a_transform_of_the_users_own_is_never_split_off() -> None:
    for base in (ColorJitter(), RandomResizedCrop(24)):
        own = type("Own", (type(base),), {"__module__": "user"})(**vars(base))
        assert SplitTransform.of(own) is SplitTransform.of(Compose([RandomResizedCrop(24), own])) is None


def test_a_cut_that_cannot_be_made_raises_what_the_transform_raises() -> None:
    split = SplitTransform.of(CenterCrop(60))
    assert split is not None
    with pytest.raises(ValueError, match="does not fit into"):
        split.cut(Draws(0, 0, np.arange(3)), (50, 70, 3))
    split = SplitTransform.of(Resize(20))
    assert split is not None
    sizes = np.array([[10, 20], [10, 30], [20, 10]])
    with pytest.raises(ValueError, match="one size"):
        split.cut(Draws(0, 0, np.arange(3)), (50, 50, 3), sizes).size  # noqa: B018
