"""Masks of patches have the distributions of their sources; recorded crops say where each pixel came from."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chisquare, ks_2samp
from transforms import SINGLE

from shardio.augment import (
    BlockPatchMask,
    CenterCrop,
    Compose,
    HorizontalFlip,
    MultiBlockMask,
    Normalize,
    Pad,
    PerSample,
    RandomApply,
    RandomChoice,
    RandomCrop,
    RandomPatchMask,
    RandomResizedCrop,
    RandomRotation,
    RecordCrops,
    Resize,
    VerticalFlip,
    Views,
    patch_indices,
)
from shardio.augment.chain import Transform

COUNT = 2000
SEED = 20
GRID = 14
# A test of a right distribution fails once in 10,000 seeds; the seed is fixed.
LEAST = 1e-4
Mask = NDArray[np.bool_]


def added(transform: Transform, count: int = COUNT, side: int = GRID, **options: Any) -> dict[str, NDArray[Any]]:
    """Returns the arrays that a transform adds to blank pictures."""
    images = torch.zeros(count, 1, side, side, dtype=torch.uint8)
    _, arrays = transform(images, **{"seed": SEED, "indices": range(count), **options})
    return {name: array.numpy() for name, array in arrays.items()}


def check_even(masks: Mask) -> None:
    """Checks that each place is equally often True in masks (B, H, W)."""
    counts = masks.sum(axis=0).ravel()
    # Places of a mask exclude each other, so the sum is less spread than chi-square: a bound, not a distribution.
    assert chisquare(counts).pvalue > LEAST


@pytest.mark.parametrize("ratio", [0.0, 0.6, 0.75, 1.0])
def test_random_masks_have_the_share_of_mae_and_every_patch_is_as_likely(ratio: float) -> None:
    masks = added(RandomPatchMask(1, ratio))["mask"]
    kept = int(GRID * GRID * (1 - ratio))
    assert masks.shape == (COUNT, GRID, GRID)
    assert masks.dtype == bool
    assert (~masks).sum(axis=(1, 2)).tolist() == [kept] * COUNT
    if 0 < ratio < 1:
        check_even(masks)
        # Any two patches are masked together as often as independent draws would mask them.
        pairs = masks[:, 0, 0] & masks[:, 7, 3]
        assert abs(pairs.mean() - ratio**2) < 4 * math.sqrt(0.25 / COUNT)


def block_mask(rng: random.Random, ratio: tuple[float, float], p: float, least: int, aspect: float) -> Mask:
    """A mask drawn by the rules of BEiT and DINOv3, one patch after the other."""
    mask = np.zeros((GRID, GRID), bool)
    wanted = int(GRID * GRID * rng.uniform(*ratio)) if rng.random() < p else 0
    while (room := wanted - int(mask.sum())) > 0:
        for _ in range(10):
            area = rng.uniform(least, room)
            shape = math.exp(rng.uniform(math.log(aspect), math.log(1 / aspect)))
            height, width = round(math.sqrt(area / shape)), round(math.sqrt(area * shape))
            if height >= GRID or width >= GRID:
                continue
            top, left = rng.randint(0, GRID - height), rng.randint(0, GRID - width)
            block = np.zeros_like(mask)
            block[top : top + height, left : left + width] = True
            block &= ~mask
            if 0 < block.sum() <= room:
                mask |= block
                break
        else:
            break
    free = np.flatnonzero(~mask).tolist()
    mask.flat[rng.sample(free, wanted - int(mask.sum()))] = True
    return mask


def edges_of(masks: Mask) -> NDArray[np.int64]:
    """The number of neighbors that differ: how ragged masks are."""
    across, down = masks[:, :, 1:] != masks[:, :, :-1], masks[:, 1:] != masks[:, :-1]
    return across.sum(axis=(1, 2)) + down.sum(axis=(1, 2))


@pytest.mark.parametrize(
    ("transform", "arguments"),
    [
        (BlockPatchMask(1), ((0.1, 0.5), 0.5, 4, 0.3)),
        (BlockPatchMask(1, 0.4, 1.0, 16), ((0.4, 0.4), 1.0, 16, 0.3)),
        (BlockPatchMask(1, (0.0, 0.9), 1.0, 1, (0.5, 2)), ((0.0, 0.9), 1.0, 1, 0.5)),
    ],
    ids=["DINOv3", "BEiT", "others"],
)
def test_block_masks_have_the_distribution_of_their_source(transform: BlockPatchMask, arguments: Any) -> None:
    rng = random.Random(SEED)
    expected = np.stack([block_mask(rng, *arguments) for _ in range(COUNT)])
    found = added(transform)["mask"]
    for measure in (lambda masks: masks.sum(axis=(1, 2)), edges_of, lambda masks: masks[:, :7, :7].sum(axis=(1, 2))):
        assert ks_2samp(measure(found), measure(expected)).pvalue > LEAST
    # The middle is masked more often than the corners, alike in both.
    one, other = found.mean(axis=0), expected.mean(axis=0)
    assert abs(one - other).max() < 5 * math.sqrt(2 * 0.25 / COUNT)


def multi_block(rng: random.Random, min_keep: int = 10) -> tuple[Mask, list[Mask]]:
    """Context and targets by the rules of I-JEPA, with blocks that reach the last row and column."""

    def sides(scale: tuple[float, float], ratio: tuple[float, float]) -> tuple[int, int]:
        share = rng.random()
        area = int(GRID * GRID * (scale[0] + share * (scale[1] - scale[0])))
        aspect = ratio[0] + share * (ratio[1] - ratio[0])
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        return min(height, GRID - 1), min(width, GRID - 1)

    def block(height: int, width: int) -> Mask:
        mask = np.zeros((GRID, GRID), bool)
        top, left = rng.randint(0, GRID - height), rng.randint(0, GRID - width)
        mask[top : top + height, left : left + width] = True
        return mask

    size, around = sides((0.15, 0.2), (0.75, 1.5)), sides((0.85, 1.0), (1.0, 1.0))
    targets = [block(*size) for _ in range(4)]
    while True:
        context = block(*around) & ~np.any(targets, axis=0)
        if context.sum() > min_keep:
            return context, targets


def test_blocks_of_context_and_targets_have_the_distribution_of_ijepa() -> None:
    rng = random.Random(SEED)
    contexts, targets = (np.stack(parts) for parts in zip(*[multi_block(rng) for _ in range(COUNT)], strict=True))
    found = added(MultiBlockMask(1, per_sample=True))
    assert found["targets"].shape == (COUNT, 4, GRID, GRID)
    for measure in (lambda masks: masks.sum(axis=(1, 2)), edges_of, lambda masks: masks[:, :7, :7].sum(axis=(1, 2))):
        assert ks_2samp(measure(found["context"]), measure(contexts)).pvalue > LEAST
        for number in range(4):
            assert ks_2samp(measure(found["targets"][:, number]), measure(targets[:, number])).pvalue > LEAST
    assert not (found["context"] & found["targets"].any(axis=1)).any()
    # Its code never masks the last row and the last column.
    assert found["targets"][:, :, -1].any()
    assert found["targets"][:, :, :, -1].any()


def test_all_samples_of_a_batch_have_blocks_of_one_size_unless_each_draws_its_own() -> None:
    sizes = added(MultiBlockMask(1), 50)["targets"].sum(axis=(2, 3))
    assert len(set(sizes.ravel().tolist())) == 1
    own = added(MultiBlockMask(1, per_sample=True), 50)["targets"].sum(axis=(2, 3))
    assert len({*own.ravel().tolist()}) > 1
    assert (own == own[:, :1]).all()


@pytest.mark.parametrize("min_keep", [0, 20, 120])
def test_a_context_has_more_patches_than_min_keep_even_if_it_must_overlap_with_targets(min_keep: int) -> None:
    arrays = added(MultiBlockMask(1, min_keep=min_keep, per_sample=True), 300)
    assert arrays["context"].sum(axis=(1, 2)).min() > min_keep
    assert (arrays["context"] & arrays["targets"].any(axis=1)).any() == (min_keep == 120)


def test_a_context_that_cannot_be_so_large_is_an_error() -> None:
    with pytest.raises(ValueError, match="min_keep"):
        added(MultiBlockMask(1, min_keep=196), 5)


@pytest.mark.parametrize("grid", [(1, 1), (1, 7), (2, 2), (3, 20)])
def test_grids_of_any_size_are_masked(grid: tuple[int, int]) -> None:
    images = torch.zeros(30, 3, grid[0] * 4, grid[1] * 2, dtype=torch.uint8)
    for transform in (RandomPatchMask((4, 2)), BlockPatchMask((4, 2), 0.5, 1.0), MultiBlockMask((4, 2), min_keep=0)):
        if isinstance(transform, MultiBlockMask) and grid == (1, 1):
            continue  # the target is the only patch
        _, arrays = transform(images, seed=1)
        for mask in arrays.values():
            assert mask.shape[-2:] == grid
    assert BlockPatchMask((4, 2), 0.5, 1.0)(images)[1]["mask"].sum(dim=(1, 2)).unique().tolist() == [
        grid[0] * grid[1] // 2
    ]


def test_indices_of_patches_are_in_order_and_have_one_shape() -> None:
    masks = torch.rand(6, 3, 4, 5, generator=torch.Generator().manual_seed(1)) < 0.5
    found = patch_indices(masks)
    fewest = int(masks.flatten(2).sum(2).min())
    for some, mask in zip(found.flatten(0, 1), masks.flatten(0, 1), strict=True):
        assert some.tolist() == np.flatnonzero(mask).tolist()[:fewest]
    assert found.shape == (6, 3, fewest)
    mask = torch.from_numpy(added(RandomPatchMask(1))["mask"])
    both = torch.cat([patch_indices(mask), patch_indices(~mask)], dim=1)
    assert torch.equal(both.sort(dim=1).values, torch.arange(GRID * GRID).expand(COUNT, -1))
    assert patch_indices(masks[:0]).shape[:2] == (0, 3)


def test_a_mask_depends_on_the_sample_and_not_on_the_batch() -> None:
    for transform in (RandomPatchMask(1), BlockPatchMask(1), MultiBlockMask(1, per_sample=True)):
        whole = added(transform, 40)
        some = [31, 3, 7]
        for name, part in added(transform, 3, indices=some).items():
            assert np.array_equal(part, whole[name][some])
        for other in ({"seed": 1}, {"epoch": 1}, {"view": 1}):
            assert not all(np.array_equal(part, whole[name]) for name, part in added(transform, 40, **other).items())


# --- where crops are --------------------------------------------------------------------------------------------------

HEIGHT, WIDTH = 60, 80


def coordinates(count: int = 40) -> torch.Tensor:
    """Pictures whose colors say where each pixel is: red is 3 times the column, green 4 times the row."""
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    picture = np.stack([columns * 3, rows * 4, np.full_like(rows, 128)]).astype(np.uint8)
    return torch.from_numpy(picture).expand(count, -1, -1, -1)


def check_places(images: torch.Tensor, edges: torch.Tensor, slack: float = 1.0) -> None:
    """Checks that inner pixels of images come from where `edges` say."""
    height, width = images.shape[2:]
    for image, (left, top, right, bottom) in zip(images, edges.tolist(), strict=True):
        for row, column in ((height // 2, width // 2), (height // 3, 2 * width // 3), (2 * height // 3, width // 4)):
            x = left + (right - left) * (column + 0.5) / width - 0.5
            y = top + (bottom - top) * (row + 0.5) / height - 0.5
            if 2 < x < WIDTH - 3 and 2 < y < HEIGHT - 3:  # the border of Pad has no place
                assert abs(image[0, row, column] / 3 - x) < slack
                assert abs(image[1, row, column] / 4 - y) < slack


CROPS: list[list[Transform]] = [
    [],
    [RandomResizedCrop(24), HorizontalFlip()],
    [Resize(50), RandomCrop((30, 20)), HorizontalFlip(), RandomResizedCrop(24), HorizontalFlip()],
    [RandomCrop(40, padding=9), VerticalFlip(), RandomCrop((31, 30)), HorizontalFlip()],
    [Pad((3, 5, 1, 2)), HorizontalFlip(), CenterCrop(50), Pad(2, padding_mode="reflect"), VerticalFlip()],
    [RandomChoice([Compose([VerticalFlip(), RandomCrop(30)]), Compose([Pad(4), RandomCrop(30)]), CenterCrop(30)])],
    [RandomResizedCrop(30), RandomApply([RandomCrop(20), Resize(30), HorizontalFlip()]), HorizontalFlip()],
]


@pytest.mark.parametrize("parts", CROPS, ids=repr)
def test_recorded_crops_say_where_pixels_come_from(parts: list[Transform]) -> None:
    images, arrays = Compose([*parts, RecordCrops()])(coordinates(), seed=3)
    assert isinstance(images, torch.Tensor)
    assert arrays["crops"].dtype == torch.float32
    check_places(images.float(), arrays["crops"])
    if parts and len(parts) != 1:
        assert len({tuple(edges) for edges in arrays["crops"].tolist()}) > 1


def test_crops_of_squashed_pictures_are_in_pixels_of_what_is_stored() -> None:
    images = coordinates()
    sizes = np.random.default_rng(1).integers(60, 200, (len(images), 2))
    made, arrays = Compose([RandomResizedCrop(24), HorizontalFlip(), RecordCrops()])(images, seed=3, sizes=sizes)
    assert isinstance(made, torch.Tensor)
    check_places(made.float(), arrays["crops"], 1.5)


def test_turned_pictures_and_those_of_functions_have_no_edges() -> None:
    images = coordinates()
    turned = Compose([CenterCrop(40), RandomApply([RandomRotation(30)]), RecordCrops()])(images, seed=1)[1]["crops"]
    assert 0 < turned.isnan().all(dim=1).sum() < len(images)
    assert (turned[~turned.isnan().any(dim=1)] == torch.tensor([20.0, 10, 60, 50])).all()
    changed = Compose([CenterCrop(40), PerSample(lambda image: image), RecordCrops()])(images, seed=1)[1]["crops"]
    assert changed.isnan().all()


# --- views that share draws -------------------------------------------------------------------------------------------


def test_what_comes_before_views_is_drawn_once_for_all_of_them() -> None:
    images = coordinates()
    alone = Compose([RandomResizedCrop(32), HorizontalFlip()])(images, seed=5)
    shared = Compose([RandomResizedCrop(32), HorizontalFlip(), Views([Compose([]), Resize(16), VerticalFlip(1.0)])])
    views = shared(images, seed=5)
    assert isinstance(views, tuple)
    assert torch.equal(views[0], alone)  # type: ignore[arg-type]
    assert views[1].shape == (40, 3, 16, 16)
    assert torch.equal(views[2], alone.flip(2))  # type: ignore[union-attr]


def test_a_crop_on_the_grid_of_patches_is_a_part_of_the_shared_crop() -> None:
    """As DINOv3's local_crops_subset_of_global_crops."""
    local = Compose([RandomCrop(16, step=8), RecordCrops("places")])
    crop = [RandomResizedCrop(64), HorizontalFlip()]
    views, arrays = Compose([*crop, Views([RecordCrops("whole"), *[local] * 3])])(coordinates(), seed=2)
    (whole,), places = arrays["whole"], arrays["places"]
    assert len(places) == 3
    firsts = set()
    for view, edges in zip(views[1:], places, strict=True):
        starts = (edges[:, :2] - whole[:, :2]) / (whole[:, 2:] - whole[:, :2]) * 64
        assert (starts / 8 - (starts / 8).round()).abs().max() < 1e-3
        for image, part, (left, top) in zip(views[0], view, starts.round().int().tolist(), strict=True):
            assert torch.equal(image[:, top : top + 16, left : left + 16], part)
            firsts.add((left, top))
    assert {left for left, _ in firsts} == set(range(0, 49, 8))


def test_views_inside_views_make_one_tuple_and_draw_independently() -> None:
    crop = RandomResizedCrop(16)
    nested = Views([Compose([HorizontalFlip(0.0), Views([crop, crop])]), Views([crop, crop, crop]), crop])
    views = nested(coordinates(), seed=1)
    assert isinstance(views, tuple)
    assert len(views) == 6
    for number, one in enumerate(views):
        for other in views[:number]:
            assert not (one == other).flatten(1).all(dim=1).any()


@pytest.mark.parametrize("transform", [*SINGLE, BlockPatchMask((6, 17)), MultiBlockMask((1, 1))], ids=repr)
@pytest.mark.parametrize("shared", [[], [HorizontalFlip()], [Resize((18, 17)), RandomCrop((18, 17), padding=1)]])
def test_equal_views_that_are_computed_together_are_those_that_are_computed_alone(
    transform: Transform, shared: list[Transform]
) -> None:
    images = coordinates(12)[:, :, 20:38, 30:47].contiguous(memory_format=torch.channels_last)
    view = Compose([transform, RecordCrops()])
    whole = Compose([*shared, Views([Resize(9), *[view] * 3, Compose([])])])
    together, arrays = whole(images, seed=7, indices=range(12))
    # With masks, each view is computed alone.
    alone, others = whole(images, seed=7, indices=range(12), masks={"m": images[:, 0]})
    assert all(map(torch.equal, together, alone))
    assert [view.stride() for view in together] == [view.stride() for view in alone]
    for name, tensors in arrays.items():
        assert all(
            torch.equal(one.nan_to_num(-1), other.nan_to_num(-1))
            for one, other in zip(tensors, others[name], strict=True)
        )


def test_masks_boxes_labels_and_added_arrays_come_with_views() -> None:
    images, labels = coordinates(8), torch.arange(8)
    masks = {"m": images[:, 0].clone()}
    transform = Compose(
        [RandomResizedCrop(32), Views([Compose([HorizontalFlip(), BlockPatchMask(8)]), Normalize("imagenet")])]
    )
    views, targets, arrays = transform(images, labels, masks=masks, seed=1)
    assert [view.dtype for view in views] == [torch.uint8, torch.float32]
    assert targets is labels
    assert torch.equal(arrays["m"][0], arrays["m"][1]) is False
    assert [mask.shape for mask in arrays["m"]] == [(8, 32, 32)] * 2
    assert [mask.shape for mask in arrays["mask"]] == [(8, 4, 4)]
    empty, none, nothing = transform(images[:0], labels[:0], masks={"m": masks["m"][:0]})
    assert [len(part) for part in (*empty, none, *nothing["m"], *nothing["mask"])] == [0] * 6


def test_arrays_of_one_name_are_refused() -> None:
    images = coordinates(2)
    for transform, options in (
        (Compose([RandomPatchMask(20), BlockPatchMask(20)]), {}),
        (RandomPatchMask(20, name="m"), {"masks": {"m": images[:, 0]}}),
        (MultiBlockMask(1, names=("seen", "m")), {"masks": {"m": images[:, 0]}}),
    ):
        with pytest.raises(ValueError, match="name"):
            transform(images, **options)  # type: ignore[call-overload]


def test_masks_are_not_drawn_for_some_images_only() -> None:
    with pytest.raises(ValueError, match="choice"):
        RandomApply([RandomPatchMask(20)])(coordinates(2))


def test_patches_must_divide_the_picture() -> None:
    with pytest.raises(ValueError, match="patch_size"):
        RandomPatchMask(16)(coordinates(2))
