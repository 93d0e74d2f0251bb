"""Masks of patches for training without labels, and where each image was cropped from its picture.

They are arrays that a transform adds to the batch. All random numbers depend on (seed, epoch, sample, view), so masks
are the same after a resume and on any number of ranks.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shardio.augment.batch import Batch
from shardio.augment.boxes import MOST_DRAWS, Draws, between
from shardio.augment.chain import Transform
from shardio.augment.checks import Probability, as_pair, check_probability, check_range, positive_range, whole
from shardio.augment.transforms import Size

Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]

# The tries after which BEiT adds no more blocks, and I-JEPA lets the context overlap with one more target.
_BLOCK_TRIES = 10
_CONTEXT_TRIES = 20


def patch_indices(masks: Tensor) -> Tensor:
    """Returns the numbers of the patches that are True in boolean masks (..., H, W): int64 (..., K), ascending.

    Patches are numbered line by line. K is the smallest number of True patches of all masks; the last patches of other
    masks are left out, as in I-JEPA. `patch_indices(~masks)` has the patches that are False.
    """
    flat = masks.flatten(-2)
    order = flat.byte().argsort(dim=-1, descending=True, stable=True)
    return order[..., : int(flat.sum(dim=-1).min())] if len(flat) else order


def _check_name(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be the name of an array; found {value!r}")


def _check_names(name: str, value: object) -> None:
    if not isinstance(value, tuple) or len(set(value)) != 2:
        raise ValueError(f"{name} must be the names of two arrays; found {value!r}")
    for one in value:
        _check_name(name, one)


def _check_ratio(name: str, value: object) -> None:
    low, high = check_range(name, as_pair(value), 0, 1)
    check_probability(name, low)
    check_probability(name, high)


Name = Annotated[str, _check_name]
Share = Annotated[tuple[float, float], positive_range(1)]


class _Adding(Transform):
    """Adds arrays to the batch, and leaves images as they are."""

    keeps_places = True
    name: str

    @property
    def added_names(self) -> frozenset[str]:
        return frozenset([self.name])

    def apply(self, batch: Batch, purpose: str) -> Batch:
        for name, values in self._made(batch, purpose).items():
            batch = batch.adding(name, values)
        return batch

    @abstractmethod
    def _made(self, batch: Batch, purpose: str) -> Mapping[str, NDArray[Any]]:
        """Returns the arrays to add, by name."""


@dataclass(frozen=True, repr=False)
class RecordCrops(_Adding):
    """Adds the part of the stored picture that each image shows, as an array `name`: float32 (B, 4).

    It has the left, top, right and bottom edge of the image, in pixels of the stored picture. Left and right are
    exchanged where the image is mirrored, top and bottom where it is upside down. Edges are NaN where the image was
    turned or tilted, or changed by `PerSample`. Changes after RecordCrops do not count.
    """

    name: Name = "crops"

    def _made(self, batch: Batch, purpose: str) -> Mapping[str, NDArray[Any]]:
        # The last bits of an edge depend on the sizes of the other images of the batch.
        return {self.name: batch.edges.T.round(3).astype(np.float32)}


class _PatchMask(_Adding):
    """The base class of transforms that make masks of square or rectangular patches."""

    patch_size: Size

    def _grid(self, batch: Batch) -> tuple[int, int]:
        """Returns the number of patches along height and width."""
        height, width = batch.unsquashed().size
        down, across = as_pair(self.patch_size)
        if height % down or width % across:
            raise ValueError(
                f"patch_size must divide the image's sides, (height, width) = {(height, width)}; found "
                f"{self.patch_size!r}"
            )
        return height // down, width // across


@dataclass(frozen=True, repr=False)
class RandomPatchMask(_PatchMask):
    """Masks a share `ratio` of the patches, each equally likely: an array `name`, bool (B, H, W), True where masked.

    H and W are the numbers of patches of `patch_size` pixels, or (height, width).

    He, Chen, Xie, Li, Dollár, Girshick, "Masked autoencoders are scalable vision learners", CVPR 2022.
    """

    patch_size: Size
    ratio: Probability = 0.75
    name: Name = "mask"

    def _made(self, batch: Batch, purpose: str) -> Mapping[str, NDArray[Any]]:
        grid = self._grid(batch)
        num_kept = int(math.prod(grid) * (1 - self.ratio))
        return {self.name: _ranks(batch.draws, purpose, grid) >= num_kept}


@dataclass(frozen=True, repr=False)
class BlockPatchMask(_PatchMask):
    """Masks rectangles of patches, with probability `p`: an array `name`, bool (B, H, W), True where masked.

    - `ratio`: the share of masked patches, or (min, max). Where blocks do not fill it, single patches do.
    - `min_num_patches`: the minimum area of a block, as drawn. `aspect_ratio`: the bounds of width / height.

    Bao, Dong, Piao, Wei, "BEiT: BERT pre-training of image transformers", ICLR 2022; DINOv2 and DINOv3 draw so, too.
    """

    patch_size: Size
    ratio: Annotated[float | tuple[float, float], _check_ratio] = (0.1, 0.5)
    p: Probability = 0.5
    min_num_patches: Annotated[int, whole(1)] = 4
    aspect_ratio: Annotated[tuple[float, float], positive_range()] = (0.3, 1 / 0.3)
    name: Name = "mask"

    def _made(self, batch: Batch, purpose: str) -> Mapping[str, NDArray[Any]]:
        grid, draws = self._grid(batch), batch.draws
        wanted, share = draws.uniform(purpose, 2)
        numbers = (math.prod(grid) * between(as_pair(self.ratio), share)).astype(np.int64)
        numbers = np.where(wanted < self.p, numbers, 0)
        masks = np.zeros((len(batch), *grid), bool)
        growing = np.flatnonzero(numbers)
        for number in range(math.prod(grid)):  # each block masks a patch or more
            growing = self._add_blocks(draws, f"{purpose} {number}", masks, growing, numbers)
            if not len(growing):
                break
        missing = numbers - masks.sum(axis=(1, 2))
        return {self.name: masks | (_ranks(draws, purpose, grid, masks) < missing[:, None, None])}

    def _add_blocks(
        self, draws: Draws, purpose: str, masks: Mask, growing: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Adds a block to each of the masks `growing`. Returns those that got one and have fewer than `numbers`."""
        left, grown = growing, []
        for attempt in range(_BLOCK_TRIES):
            if not len(left):
                break
            room = numbers[left] - masks[left].sum(axis=(1, 2))
            area, aspect, top, start = draws.of(left).uniform(f"{purpose}.{attempt}", 4)
            area = self.min_num_patches + (room - self.min_num_patches) * area
            aspect = np.exp(between(map(math.log, self.aspect_ratio), aspect))
            sides = np.rint(np.sqrt(np.stack([area / aspect, area * aspect])))
            limits = np.array(masks.shape[1:])[:, None]
            fits = (sides < limits).all(axis=0)
            firsts = np.floor(np.stack([top, start]) * (limits - sides + 1))
            new = _blocks(firsts, sides, masks.shape[1:]) & ~masks[left]
            count = new.sum(axis=(1, 2))
            fits &= (count > 0) & (count <= room)
            masks[left[fits]] |= new[fits]
            grown.append(left[fits & (count < room)])
            left = left[~fits]
        return np.sort(np.concatenate(grown)) if grown else left[:0]


@dataclass(frozen=True, repr=False)
class MultiBlockMask(_PatchMask):
    """Chooses blocks of patches to predict, and a block of context without them, as bool arrays, True where chosen.

    - The context, (B, H, W): a square block without the targets. Its area is a share `context_scale` of the patches.
    - The targets, (B, num_targets, H, W): blocks of the area `target_scale` and the height / width `target_ratio`.
    - The sizes of blocks are drawn once per batch, by the batch's first sample; with `per_sample`, for each sample.
    - `min_keep`: a context has more patches than this. Other places are tried first; then it keeps parts of targets.

    Assran, Duval, Misra, Bojanowski, Vincent, Rabbat, LeCun, Ballas, "Self-supervised learning from images with a
    joint-embedding predictive architecture", CVPR 2023. Unlike its code, blocks also reach the last row and column.
    """

    patch_size: Size
    num_targets: Annotated[int, whole(1, MOST_DRAWS // 2)] = 4
    target_scale: Share = (0.15, 0.2)
    target_ratio: Annotated[tuple[float, float], positive_range()] = (0.75, 1.5)
    context_scale: Share = (0.85, 1.0)
    min_keep: Annotated[int, whole(0)] = 10
    per_sample: bool = False
    names: Annotated[tuple[str, str], _check_names] = ("context", "targets")

    @property
    def added_names(self) -> frozenset[str]:
        return frozenset(self.names)

    def _made(self, batch: Batch, purpose: str) -> Mapping[str, NDArray[Any]]:
        grid, draws, count = self._grid(batch), batch.draws, len(batch)
        shares = (draws if self.per_sample else draws.of_the_batch()).uniform(purpose, 2)
        sides, around = (
            np.broadcast_to(_block_sides(grid, scale, ratio, share), (2, count))
            for scale, ratio, share in zip(
                (self.target_scale, self.context_scale), (self.target_ratio, (1.0, 1.0)), shares, strict=True
            )
        )
        places = draws.uniform(f"{purpose} targets", 2 * self.num_targets).reshape(2, self.num_targets, count)
        targets = np.stack([_blocks(_placed(grid, sides, some), sides, grid) for some in places.swapaxes(0, 1)], axis=1)
        context, left = np.zeros((count, *grid), bool), np.arange(count)
        for attempt in range(_CONTEXT_TRIES * (self.num_targets + 1)):
            if not len(left):
                return dict(zip(self.names, (context, targets), strict=True))
            some = draws.of(left).uniform(f"{purpose} context {attempt}", 2)
            blocks = _blocks(_placed(grid, around[:, left], some), around[:, left], grid)
            num_avoided = self.num_targets - attempt // _CONTEXT_TRIES
            context[left] = blocks & ~targets[left, :num_avoided].any(axis=1)
            left = left[context[left].sum(axis=(1, 2)) <= self.min_keep]
        found = int(context[left[0]].sum())
        raise ValueError(f"min_keep must be less than the patches of a context; found {self.min_keep} and {found}")


def _ranks(draws: Draws, purpose: str, grid: tuple[int, int], last: Mask | None = None) -> NDArray[np.int64]:
    """Returns the patches' places in a random order, (B, *grid). Patches of `last` come after all others."""
    count = math.prod(grid)
    firsts = range(0, count, MOST_DRAWS)
    noise = np.concatenate([draws.uniform(f"{purpose}/{i}", min(MOST_DRAWS, count - i)) for i in firsts]).T
    if last is not None:
        noise = noise + last.reshape(noise.shape)
    return noise.argsort(axis=1).argsort(axis=1).reshape(-1, *grid)


def _block_sides(
    grid: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float], share: Floats
) -> Floats:
    """Returns heights and widths of blocks in patches, (2, B). One number decides both, as in I-JEPA."""
    area = np.floor(math.prod(grid) * between(scale, share))
    aspect = between(ratio, share)
    sides = np.rint(np.sqrt(np.stack([area * aspect, area / aspect])))
    return np.clip(sides, 1, np.maximum(np.array(grid) - 1, 1)[:, None])


def _placed(grid: tuple[int, int], sides: Floats, places: Floats) -> Floats:
    """Returns the first rows and columns of blocks, (2, B), from random numbers `places` from [0, 1), (2, B)."""
    return np.floor(places * (np.array(grid)[:, None] - sides + 1))


def _blocks(firsts: Floats, sides: Floats, grid: tuple[int, ...]) -> Mask:
    """Returns masks, (B, *grid), of blocks from their first rows and columns and their sides, (2, B) each."""
    down, across = (
        (np.arange(size) >= first[:, None]) & (np.arange(size) < (first + side)[:, None])
        for size, first, side in zip(grid, firsts, sides, strict=True)
    )
    blocks: Mask = down[:, :, None] & across[:, None, :]
    return blocks
