"""Masks move as their pictures do: a picture that is its own mask stays its own mask."""

from __future__ import annotations

from fractions import Fraction
from math import floor
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transforms import SINGLE, name_of

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
from shardio.augment.boxes import Boxes
from shardio.augment.chain import Transform
from shardio.augment.masks import MOVES
from shardio.augment.stage import Stage
from shardio.augment.steps import FILL_AT, SAMPLING_AT
from shardio.kernels.pixels import run_steps
from shardio.kernels.resample import Planes

COUNT, HEIGHT, WIDTH = 12, 18, 17


def random_images(count: int = COUNT, height: int = HEIGHT, width: int = WIDTH, seed: int = 5) -> Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(1, 256, (count, 3, height, width), np.uint8))


IMAGES = random_images()


def moved(transform: Transform, images: Tensor, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Returns what a transform makes of images, and of its arrays."""
    changed, arrays = transform(images, **{"seed": 0, "indices": range(len(images)), **options})
    assert isinstance(arrays, dict)
    return changed, arrays


def as_mask(images: Tensor) -> Tensor:
    return images.permute(0, 2, 3, 1)


def by_parts(images: Tensor, boxes: Boxes, flips: NDArray[np.bool_], size: tuple[int, int]) -> Tensor:
    """Crops and resizes images by nearest neighbor: with fractions, one line and column after the other."""
    result = torch.zeros(len(images), images.shape[1], *size, dtype=torch.uint8)
    for number, picture in enumerate(images):
        lines = []
        for start, length, side, limit in (
            (boxes.tops[number], boxes.heights[number], size[0], images.shape[2]),
            (boxes.lefts[number], boxes.widths[number], size[1], images.shape[3]),
        ):
            part = Fraction(length).limit_denominator(10**6)
            middles = [
                Fraction(start).limit_denominator(10**6) + (at + Fraction(1, 2)) * part / side for at in range(side)
            ]
            lines.append([min(max(floor(middle), 0), limit - 1) for middle in middles])
        rows, columns = lines
        result[number] = picture[:, rows][:, :, columns[::-1] if flips[number] else columns]
    return result.contiguous(memory_format=torch.channels_last)


def make_by_parts(self: Stage, planes: Planes, some: Any, out: NDArray[np.uint8]) -> None:
    """Does what `Stage.make` does for whole images, by nearest neighbor. Only steps that move pixels are run."""
    pixels = np.empty((len(some), *self.source), np.uint8)
    planes.copy_images(pixels)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    flips, boxes = self.flips[some], self.boxes[some]
    if self.canvas is None:
        out[:] = as_mask(by_parts(images, boxes, flips, self.size)).numpy()
    for line, number in enumerate(some.tolist() if self.canvas is not None else []):
        one = slice(line, line + 1)
        size, first = self.canvas.sizes[number].tolist(), self.canvas.firsts[number].tolist()  # type: ignore[union-attr]
        made = by_parts(images[one], boxes[one], flips[one], (size[0], size[1]))[0]
        room = max(*self.size, *map(abs, first), *size)
        wide = as_mask(torch.nn.functional.pad(made, (room,) * 4)[None])[0].numpy()
        places = self.canvas.outside(self.size)  # type: ignore[union-attr]
        if self.canvas.mode == "constant":  # type: ignore[union-attr]
            rows, columns = (np.arange(side) + at for side, at in zip(self.size, first, strict=True))
        else:
            rows, columns = (place[number] for place in places)
        out[line] = wide[rows + room][:, columns + room]
    for step in self.steps:
        values = step.values[some].copy()
        values[:, SAMPLING_AT] = 0
        values[:, FILL_AT:] = 0
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


def is_its_own_mask(transform: Transform, images: Tensor, **options: Any) -> None:
    changed, arrays = moved(transform, images, masks={"mask": as_mask(images)}, **options)
    views = zip(changed, arrays["mask"], strict=True) if isinstance(changed, tuple) else [(changed, arrays["mask"])]
    for view, mask in views:
        assert torch.equal(as_mask(view), mask)


each = pytest.mark.parametrize("transform", SINGLE, ids=name_of)

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
        is_its_own_mask(transform, IMAGES, epoch=epoch)


@pytest.mark.parametrize("size", [(18, 17), (36, 51), (9, 20), (7, 5), 31, 6, (1, 1)])
def test_a_resize_takes_the_pixels_that_torch_calls_nearest_exact(size: Any) -> None:
    _, arrays = moved(Resize(size), IMAGES, masks={"mask": as_mask(IMAGES)})
    shape = arrays["mask"].shape[1:3]
    expected = torch.nn.functional.interpolate(IMAGES, shape, mode="nearest-exact")
    assert torch.equal(arrays["mask"], as_mask(expected))


@pytest.mark.usefixtures("nearest")
@each
def test_a_picture_read_by_nearest_neighbor_is_its_own_mask(transform: Transform) -> None:
    for epoch in range(3):
        is_its_own_mask(transform, IMAGES, epoch=epoch)
    sizes = np.stack([np.arange(20, 20 + COUNT), np.arange(40, 40 - COUNT, -1)], axis=1)
    try:
        is_its_own_mask(transform, IMAGES, sizes=sizes)
    except ValueError as error:
        assert "must have one size" in str(error)  # noqa: PT017 - some want all pictures of one size
    is_its_own_mask(transform, IMAGES, sizes=np.tile([33, 25], (COUNT, 1)))


@pytest.mark.usefixtures("nearest")
@pytest.mark.parametrize("seed", range(40))
def test_a_picture_is_its_own_mask_through_random_chains(seed: int) -> None:
    rng = np.random.default_rng(seed)
    chain = Compose([SINGLE[number] for number in rng.integers(len(SINGLE), size=rng.integers(2, 5))])
    print(seed, chain)
    images = random_images(5, *rng.integers(14, 30, 2).tolist(), seed)
    sizes = np.tile(rng.integers(14, 40, 2), (5, 1)) if seed % 2 else None
    try:
        chain(images, seed=seed, sizes=sizes)
    except ValueError as error:
        assert "does not fit" in str(error)  # noqa: PT017 - what is left of the picture may be too small
        return
    is_its_own_mask(chain, images, seed=seed, sizes=sizes)


@pytest.mark.parametrize("fill", [7, {"m": 7}])
@pytest.mark.parametrize("kind", [Compose, Views])
def test_a_chain_carries_what_masks_are_filled_with(fill: Any, kind: Any) -> None:
    parts, masks = [Compose([Pad(2), RandomRotation(40)])], {"m": as_mask(IMAGES)}
    expected = moved(kind(parts), IMAGES, masks=masks, mask_fill=7)[1]["m"]
    found = moved(kind(parts, mask_fill=fill), IMAGES, masks=masks)[1]["m"]
    called = moved(kind(parts, mask_fill=3), IMAGES, masks=masks, mask_fill=fill)[1]["m"]
    for one in (found, called):
        assert all(map(torch.equal, one, expected))


def test_masks_of_many_channels_and_any_layout() -> None:
    chain = Compose([RandomResizedCrop(9), RandomRotation(30), Pad(1)])
    rng = np.random.default_rng(0)
    mask = torch.from_numpy(rng.normal(size=(COUNT, HEIGHT, WIDTH, 21)).astype(np.float32))  # more bytes than channels
    options: dict[str, Any] = {"mask_fill": -0.5}
    found = moved(chain, IMAGES, masks={"m": mask}, **options)[1]["m"]
    lying = mask.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    assert torch.equal(moved(chain, IMAGES, masks={"m": lying}, **options)[1]["m"], found)
    for channel in (0, 15, 16, 20):
        one = moved(chain, IMAGES, masks={"m": mask[..., channel]}, **options)[1]["m"]
        assert torch.equal(found[..., channel], one)
        assert (one == -0.5).any()


def test_masks_of_any_dtype_keep_their_values() -> None:
    choice = RandomChoice([Pad(1), Compose([VerticalFlip(), Pad(1)])])
    chain = Compose([Resize((30, 24)), RandomRotation(40), RandomCrop(20), choice])
    levels = IMAGES[:, 0]
    expected = moved(chain, IMAGES, masks={"m": levels})[1]["m"]
    for dtype in (
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    ):
        found = moved(chain, IMAGES, masks={"m": levels.to(dtype)})[1]["m"]
        assert found.dtype == dtype
        assert torch.equal(found, expected.to(dtype))
    special = torch.where(levels > 128, torch.nan, levels.float()).masked_fill(levels < 20, torch.inf)
    found = moved(chain, IMAGES, masks={"m": special})[1]["m"]
    assert torch.equal(found.isnan(), expected > 128)
    assert torch.equal(found.isinf(), (expected < 20) & (expected > 0))


def test_outside_of_the_picture_masks_are_filled() -> None:
    ones = torch.ones(COUNT, HEIGHT, WIDTH, dtype=torch.uint8)
    masks = {"classes": ones, "depth": ones.double(), "kept": ones.bool()}
    fills = {"classes": 255, "depth": float("nan")}
    turn = RandomRotation((45, 45))
    _, arrays = moved(turn, IMAGES, masks=masks, mask_fill=fills)
    outside = arrays["classes"] == 255
    assert 0.05 < outside.float().mean() < 0.5
    assert torch.equal(arrays["depth"].isnan(), outside)
    assert torch.equal(~arrays["kept"], outside)
    _, arrays = moved(Compose([turn, Pad(2), turn]), IMAGES, masks={"m": ones}, mask_fill=9)
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
    images, arrays = moved(Compose([RandomCrop(9), VerticalFlip(), Inverted()]), IMAGES, masks={"m": IMAGES[:, 0]})
    assert torch.equal(images[:, 0], 255 - arrays["m"])
