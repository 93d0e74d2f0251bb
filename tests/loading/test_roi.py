"""Gather threads make the pixels of a transform, from only what it sees of stored pictures, for every reader."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from arrays import change_split, some_arrays
from by_hand import flat
from numpy.typing import NDArray
from pictures import random_picture
from transforms import OF_BATCHES, SINGLE, name_of

from shardio.augment import (
    CenterCrop,
    ColorJitter,
    Compose,
    HorizontalFlip,
    Mixup,
    Normalize,
    Pad,
    PerSample,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    RandomRotation,
    Resize,
    Views,
    recipe,
)
from shardio.augment.chain import Transform
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.loading.loader import ShardLoader
from shardio.system.pour import direct_alignment

COUNT, HEIGHT, WIDTH = 53, 40, 36
USUAL = Compose([RandomResizedCrop(24), HorizontalFlip(), Normalize("imagenet")])
COLORED = Compose([RandomResizedCrop((20, 26)), ColorJitter(0.4), HorizontalFlip()])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set with arrays, whose rows are stored in another order."""
    out = tmp_path_factory.mktemp("roi") / "set"
    rng = np.random.default_rng(1)
    with ShardWriter(out, (HEIGHT, WIDTH, 3), classes=list("abcde"), shard_nbytes=20 * HEIGHT * WIDTH * 3) as writer:
        for i in range(COUNT):
            writer.append(random_picture(rng, HEIGHT, WIDTH), i % 5)
    small = rng.integers(0, 256, (COUNT, 30, 28, 3), dtype=np.uint8)
    change_split(out, {**some_arrays(COUNT, HEIGHT, WIDTH), "small": ("array", small)}, rng.permutation(COUNT))
    return out


def check(path: Path, transform: Any = USUAL, batch_size: int = 7, epochs: int = 2, **options: Any) -> None:
    """Compares every batch with that of a loader which compares checksums, and so reads whole pictures."""
    if options.get("io") == "direct" and direct_alignment(path / "train-00000.npy") is None:
        pytest.skip("O_DIRECT does not work here")
    options = {"device": "cpu", "tail": "short", "seed": 4, "return_indices": True, "num_threads": 2, **options}
    with (
        ShardLoader(path, batch_size, transform=transform, check="sample", **options) as whole,
        ShardLoader(path, batch_size, transform=transform, **options) as loader,
    ):
        assert (whole.stats()["roi"], loader.stats()["roi"]) == (True, True)
        for _ in range(epochs):
            for expected, found in zip(whole, loader, strict=True):
                for one, other in zip(flat(expected), flat(found), strict=True):
                    assert torch.equal(one, other)
                    assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert loader.stats()["read_nbytes"] < whole.stats()["read_nbytes"]


@pytest.mark.parametrize(
    "options",
    [
        *({"io": io, "transform": COLORED} for io in ("mmap", "pread", "direct")),
        {"num_threads": 5, "batch_size": 3, "prefetch": 0, "shuffle": False},
        {"tail": "pad", "rank": 1, "world_size": 2, "arrays": ["mask", "clip", "small"]},
        {"weights": [1.0, 2.0] + [0.1] * (COUNT - 2), "epoch_batches": 5, "tail": "drop"},
        {"transform": Compose([RandomResizedCrop(24), Normalize(), Mixup(5)])},
    ],
    ids=repr,
)
def test_batches_are_the_same_whatever_else_is_asked_for(path: Path, options: dict[str, Any]) -> None:
    check(path, **options)


@pytest.mark.filterwarnings("ignore:.*empty on rank:RuntimeWarning")
@pytest.mark.parametrize(
    "transform",
    [CenterCrop(56), Pad(2), lambda images: Pad(2)(images)],
    ids=["crop", "pad", "function"],
)
def test_an_empty_batch_of_squashed_pictures_has_the_shape_of_the_others(squashed: Path, transform: Any) -> None:
    options: dict[str, Any] = {"device": "cpu", "tail": "short", "transform": transform, "indices": [0]}
    shapes = []
    for rank in (0, 1):
        with ShardLoader(squashed, 1, rank=rank, world_size=2, **options) as loader:
            ((images, _),) = loader
            shapes.append(tuple(images.shape))
    assert shapes == [(0, *shapes[1][1:]), (1, *shapes[1][1:])]


def test_squashed_pictures_are_cut_as_they_were_before(squashed: Path) -> None:
    check(squashed, batch_size=5)
    check(squashed, Compose([Resize(36), CenterCrop(32), Normalize()]), batch_size=5)


def test_a_transform_may_be_set_between_epochs_and_not_in_one(path: Path) -> None:
    changes: list[Any] = [USUAL, COLORED, None, lambda images: images[:, :, :4], Normalize(), USUAL]
    options: dict[str, Any] = {"device": "cpu", "seed": 4, "transform": USUAL, "num_threads": 2, "prefetch": 3}
    with ShardLoader(path, 7, check="sample", **options) as whole, ShardLoader(path, 7, **options) as loader:
        for transform in changes:
            whole.transform = loader.transform = transform
            batches = iter(loader)
            found = [next(batches)]
            with pytest.raises(RuntimeError, match="between epochs only; found an epoch with 6 batches to come"):
                loader.transform = torch.clone
            assert loader.transform is transform
            found += batches
            for (expected, _), (images, _) in zip(whole, found, strict=True):
                assert torch.equal(expected, images)
        next(unfinished := iter(loader))
        del unfinished
        loader.transform = None  # as nobody can go on with that epoch


@pytest.mark.parametrize(
    ("options", "made"),
    [
        ({"check": "sample"}, True),
        ({"transform": None}, False),
        ({"transform": torch.clone}, False),
        ({"transform": PerSample(torch.clone)}, False),
        ({"transform": Normalize()}, True),
        ({"transform": ColorJitter(0.4)}, True),
    ],
    ids=["checked", "none", "another", "per sample", "normalized", "of pixels"],
)
def test_whole_pictures_are_read_where_they_are_needed(path: Path, options: dict[str, Any], made: bool) -> None:
    with ShardLoader(path, 5, device="cpu", **{"transform": USUAL, **options}) as loader:
        list(loader)
        stats = loader.stats()
        assert stats["roi"] is made
        assert stats["read_nbytes"] == 10 * 5 * HEIGHT * WIDTH * 3


class Flip:
    """A function of one image and its masks, as of Albumentations."""

    __module__ = "albumentations"

    def __call__(self, image: NDArray[Any], mask: NDArray[Any]) -> dict[str, Any]:
        return {"image": image[::-1], "mask": mask[::-1]}


OTHERS: list[Transform] = [
    recipe("dino", 24),
    recipe("timm-rsb-a3", 24, 5),
    Views([PerSample(Flip()), RandomErasing(1.0)]),
    Compose([PerSample(Flip()), Views([RandomCrop(8), RandomCrop(9)])]),
    Compose([RandomCrop(24, padding=4), RandomRotation((30, 60))], mask_fill=255),
    Views([RandomCrop(36, padding=2), Compose([RandomRotation((30, 60))])], {"mask": 9}),
]


@pytest.mark.parametrize("transform", [*SINGLE, *OF_BATCHES, *OTHERS], ids=name_of)
def test_batches_are_those_of_the_transform_called_by_hand(path: Path, transform: Transform) -> None:
    masks = [] if transform.mixes else ["mask"]
    ways = [("mmap", 1), ("pread", 4)]
    options: dict[str, Any] = {"device": "cpu", "seed": 4, "tail": "short", "arrays": masks, "return_indices": True}
    with ShardLoader(path, 20, **options) as plain, ExitStack() as stack:
        loaders = [
            stack.enter_context(ShardLoader(path, 20, transform=transform, io=io, num_threads=threads, **options))
            for io, threads in ways
        ]
        for (stored, labels, indices, *more), *found in zip(plain, *loaders, strict=True):
            given = {"masks": {"mask": more[0]["mask"]}} if masks else {}
            expected = transform(stored, labels, indices=indices, seed=4, epoch=0, **given)
            images, targets, *moved = expected
            for pixels, classes, _, *arrays in found:
                assert all(map(torch.equal, flat(pixels), flat(images)))
                assert torch.equal(classes, targets)
                if masks:
                    assert all(map(torch.equal, flat(arrays[0]["mask"]), flat(moved[0]["mask"])))


def test_what_a_program_raises_is_raised_where_the_batch_was_due(path: Path) -> None:
    with ShardLoader(path, 5, device="cpu", transform=CenterCrop(38), num_threads=1) as loader:
        with pytest.raises(ValueError, match="does not fit"):
            next(iter(loader))
        loader.transform = CenterCrop(36)
        assert next(iter(loader))[0].shape == (5, 3, 36, 36)
