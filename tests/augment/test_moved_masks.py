"""Masks move as their pictures do: a picture that is its own mask stays its own mask."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from math import floor
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transforms import SINGLE

import shardio.augment.transforms
from shardio.augment import (
    CenterCrop,
    Compose,
    HorizontalFlip,
    Normalize,
    Pad,
    RandomAffine,
    RandomApply,
    RandomChoice,
    RandomCrop,
    RandomErasing,
    RandomOrder,
    RandomPerspective,
    RandomResizedCrop,
    RandomRotation,
    Resize,
    ToDtype,
    VerticalFlip,
    Views,
)
from shardio.augment.batch import Batch
from shardio.augment.chain import Transform
from shardio.augment.masks import MOVES
from shardio.augment.stage import Canvas, Stage
from shardio.augment.steps import SAMPLING_AT
from shardio.kernels.pixels import run_steps
from shardio.kernels.resample import Planes

COUNT, HEIGHT, WIDTH = 12, 18, 17
IMAGES = torch.from_numpy(np.random.default_rng(5).integers(1, 256, (COUNT, 3, HEIGHT, WIDTH), np.uint8))


def moved(transform: Transform, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Returns what a transform makes of IMAGES, and of their masks."""
    changed, arrays = transform(IMAGES, **{"seed": 0, "indices": range(COUNT), **options})
    return changed, arrays


def as_mask(images: Tensor) -> Tensor:
    return images.permute(0, 2, 3, 1)


def by_parts(picture: NDArray[np.uint8], box: list[float], flip: bool, size: tuple[int, ...]) -> NDArray[np.uint8]:
    """Crops and resizes a picture by nearest neighbor: with fractions, one line and column after the other."""
    starts, lengths = ([Fraction(side).limit_denominator(10**6) for side in sides] for sides in (box[:2], box[2:]))
    rows, columns = (
        [min(max(floor(start + (at + Fraction(1, 2)) * length / side), 0), limit - 1) for at in range(side)]
        for start, length, side, limit in zip(starts, lengths, size, picture.shape, strict=False)
    )
    return picture[rows][:, columns[::-1] if flip else columns]


def make_by_parts(self: Stage, planes: Planes, some: Any, out: NDArray[np.uint8]) -> None:
    """Does what `Stage.make` does for whole images, by nearest neighbor. Only steps that move pixels are run."""
    pixels = np.empty((len(some), *self.source), np.uint8)
    planes.copy_images(pixels)
    sizes = np.tile(self.size, (len(self.flips), 1))
    canvas = self.canvas or Canvas(sizes, np.zeros_like(sizes))
    for line, number in enumerate(some.tolist()):
        size = tuple(canvas.sizes[number].tolist())
        made = by_parts(pixels[line], self.boxes.sides[number].tolist(), bool(self.flips[number]), size)
        rows, columns = (places[number] for places in canvas.outside(self.size))
        # Place -1 is black.
        out[line] = np.pad(made, [(0, 1), (0, 1), (0, 0)])[rows][:, columns]
    for step in self.steps:
        values = step.values[some].copy()
        values[:, SAMPLING_AT:] = 0
        codes = step.codes[some]
        run_steps(out, np.where(np.isin(codes, MOVES), codes, np.uint8(0))[None], values[None])


@pytest.fixture
def nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are read by nearest neighbor everywhere, are black outside, and keep their colors."""

    def stays(self: Transform, batch: Batch, purpose: str) -> Batch:
        return batch.unsquashed().finished()

    monkeypatch.setattr(Stage, "make", make_by_parts)
    monkeypatch.setattr(shardio.augment.transforms, "fill_of", lambda fill, channels: (0.0,) * channels)
    for kind in (Normalize, ToDtype):
        monkeypatch.setattr(kind, "apply", lambda self, batch, purpose: batch)
    monkeypatch.setattr(RandomErasing, "apply", stays)


def assert_is_its_own_mask(transform: Transform, **options: Any) -> None:
    changed, arrays = moved(transform, masks={"m": as_mask(IMAGES)}, **options)
    views = zip(changed, arrays["m"], strict=True) if isinstance(changed, tuple) else [(changed, arrays["m"])]
    for view, mask in views:
        assert torch.equal(as_mask(view), mask)


# Those that need no other definition of nearest neighbors: pixels stay whole.
EXACT: list[Transform] = [
    Compose([RandomCrop(9), HorizontalFlip(), RandomCrop((5, 8)), VerticalFlip()]),
    Pad((1, 2, 3, 4)),
    Pad(3, padding_mode="edge"),
    Pad((2, 5), padding_mode="reflect"),
    Pad(4, padding_mode="symmetric"),
    RandomCrop((25, 12), pad_if_needed=True),
    CenterCrop((25, 12), "reflect"),
    CenterCrop(40, "edge"),
    Compose([HorizontalFlip(), CenterCrop((5, 12)), RandomCrop(11, padding_mode="symmetric", pad_if_needed=True)]),
    RandomAffine(40, (0.3, 0.3), (0.4, 3), (-20, 20, -20, 20)),
    RandomAffine(0, scale=(1e-9, 1e-8)),
    Compose([VerticalFlip(), RandomRotation(30), RandomCrop(11), Pad(2), RandomPerspective(0.5, 1, "nearest")]),
    RandomApply([HorizontalFlip(), RandomCrop((HEIGHT, WIDTH), 5), RandomRotation(90)]),
    RandomChoice([Compose([RandomCrop(13), VerticalFlip(1.0)]), CenterCrop(13), Compose([Pad(2), CenterCrop(13)])]),
    RandomOrder([RandomRotation(30), HorizontalFlip(), RandomPerspective(0.3, 1, "nearest")]),
    Views([RandomCrop(9), Compose([VerticalFlip(), RandomRotation(45)])]),
]


@pytest.mark.parametrize("transform", EXACT, ids=repr)
def test_a_picture_whose_pixels_stay_whole_is_its_own_mask(transform: Transform) -> None:
    for epoch in range(4):
        assert_is_its_own_mask(transform, epoch=epoch)


@pytest.mark.parametrize("size", [(18, 17), (36, 51), (9, 20), (7, 5), 31, 6, (1, 1)])
def test_a_resize_takes_the_pixels_that_torch_calls_nearest_exact(size: Any) -> None:
    _, arrays = moved(Resize(size), masks={"mask": as_mask(IMAGES)})
    shape = arrays["mask"].shape[1:3]
    expected = torch.nn.functional.interpolate(IMAGES, shape, mode="nearest-exact")
    assert torch.equal(arrays["mask"], as_mask(expected))


def drawn_chains() -> Iterator[Transform]:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        yield Compose([SINGLE[number] for number in rng.integers(len(SINGLE), size=rng.integers(2, 5))])


SIZES = [None, np.tile([33, 25], (COUNT, 1)), np.stack([np.arange(20, 20 + COUNT), np.arange(40, 40 - COUNT, -1)], 1)]


@pytest.mark.usefixtures("nearest")
@pytest.mark.parametrize("transform", [*SINGLE, *drawn_chains()], ids=repr)
def test_a_picture_read_by_nearest_neighbor_is_its_own_mask(transform: Transform) -> None:
    for epoch, sizes in enumerate(SIZES):
        try:
            assert_is_its_own_mask(transform, epoch=epoch, sizes=sizes)
        except ValueError as error:
            # What is left of the picture may be too small, and some want all pictures of one size.
            assert re.search("does not fit|must have one size", str(error))  # noqa: PT017


@pytest.mark.parametrize("fill", [7, {"m": 7}])
@pytest.mark.parametrize("kind", [Compose, Views])
def test_a_chain_carries_what_masks_are_filled_with(fill: Any, kind: Any) -> None:
    parts, masks = [Compose([Pad(2), RandomRotation(40)])], {"m": as_mask(IMAGES)}
    expected = moved(kind(parts), masks=masks, mask_fill=7)[1]["m"]
    found = moved(kind(parts, mask_fill=fill), masks=masks)[1]["m"]
    called = moved(kind(parts, mask_fill=3), masks=masks, mask_fill=fill)[1]["m"]
    for one in (found, called):
        assert all(map(torch.equal, one, expected))


def test_masks_of_many_channels_and_any_layout() -> None:
    chain = Compose([RandomResizedCrop(9), RandomRotation(30), Pad(1)])
    mask = torch.rand(COUNT, HEIGHT, WIDTH, 21)  # more bytes than the kernel has channels
    lying = mask.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    channels = {str(channel): mask[..., channel] for channel in (0, 15, 16, 20)}
    _, found = moved(chain, masks={"m": mask, "lying": lying, **channels}, mask_fill=-0.5)
    assert torch.equal(found["m"], found["lying"])
    for channel in channels:
        assert torch.equal(found["m"][..., int(channel)], found[channel])
        assert (found[channel] == -0.5).any()


def test_masks_of_any_dtype_keep_their_values() -> None:
    choice = RandomChoice([Pad(1), Compose([VerticalFlip(), Pad(1)])])
    chain = Compose([Resize((30, 24)), RandomRotation(40), RandomCrop(20), choice])
    levels = IMAGES[:, 0]
    special = torch.where(levels > 128, torch.nan, levels.float()).masked_fill(levels < 20, torch.inf)
    integers = torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64
    dtypes = *integers, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool
    masks = {str(dtype): levels.to(dtype) for dtype in dtypes}
    _, found = moved(chain, masks={"m": levels, "special": special, **masks})
    for dtype in dtypes:
        assert found[str(dtype)].dtype == dtype
        assert torch.equal(found[str(dtype)], found["m"].to(dtype))
    assert torch.equal(found["special"].isnan(), found["m"] > 128)
    assert torch.equal(found["special"].isinf(), (found["m"] < 20) & (found["m"] > 0))


def test_outside_of_the_picture_masks_are_filled() -> None:
    ones = torch.ones(COUNT, HEIGHT, WIDTH, dtype=torch.uint8)
    masks = {"classes": ones, "depth": ones.double(), "kept": ones.bool()}
    fills = {"classes": 255, "depth": float("nan")}
    turn = RandomRotation((45, 45))
    _, arrays = moved(turn, masks=masks, mask_fill=fills)
    outside = arrays["classes"] == 255
    assert 0.05 < outside.float().mean() < 0.5
    assert torch.equal(arrays["depth"].isnan(), outside)
    assert torch.equal(~arrays["kept"], outside)
    _, arrays = moved(Compose([turn, Pad(2), turn]), masks={"m": ones}, mask_fill=9)
    assert sorted(arrays["m"].unique().tolist()) == [1, 9]


def test_the_result_has_arrays_only_if_masks_were_given() -> None:
    labels = torch.arange(COUNT)
    flip = HorizontalFlip()
    assert isinstance(flip(IMAGES), Tensor)
    assert isinstance(flip(IMAGES, masks=None), Tensor)
    assert len(flip(IMAGES, labels)) == len(flip(IMAGES, labels, masks=None)) == 2
    assert flip(IMAGES, masks={})[1] == flip(IMAGES, labels, masks={})[2] == {}


def test_a_transform_of_the_users_that_changes_the_size_must_move_masks_itself() -> None:
    class Halved(Transform):
        def apply(self, batch: Batch, purpose: str) -> Batch:
            return batch.holding(batch.finished().images[:, :, ::2])

    class Inverted(Transform):
        def apply(self, batch: Batch, purpose: str) -> Batch:
            return batch.finished().holding(255 - batch.finished().images)

    assert isinstance(Halved()(IMAGES), Tensor)
    with pytest.raises(ValueError, match=r"\(9, 17\); found \(18, 17\)"):
        Halved()(IMAGES, masks={"m": IMAGES[:, 0]})
    images, arrays = moved(Compose([RandomCrop(9), VerticalFlip(), Inverted()]), masks={"m": IMAGES[:, 0]})
    assert torch.equal(images[:, 0], 255 - arrays["m"])
