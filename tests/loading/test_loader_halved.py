"""A set that is stored as yuv420 gives the batches of a set of plain pixels with the same pictures."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import flat
from folders import flip
from halved import SHAPE, make_halved_set, make_plain_copy

from shardio.augment import (
    CenterCrop,
    Compose,
    HorizontalFlip,
    Normalize,
    PerSample,
    RandomCrop,
    RandomResizedCrop,
    Views,
)
from shardio.errors import FormatError
from shardio.kernels.rowcopy import Windows
from shardio.loading.dataset import ShardDataset
from shardio.loading.loader import ShardLoader
from shardio.reading.shardset import open_shards
from shardio.sets.verify import verify

NUM_SAMPLES = 47
CROP = Compose([RandomCrop((7, 9)), HorizontalFlip()])
TRANSFORMS: dict[str, Any] = {
    "none": None,
    "crops": CROP,
    "crops, normalized": Compose([CROP, Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.2))]),
    "normalized": Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.2)),
    "views": Views([CROP, CenterCrop(6)]),
    "another function first": PerSample(lambda image: image.flip(0)),
    "of whole batches": lambda images: images.float().mean(dim=1),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("halved")
    halved = make_halved_set(folder / "halved", NUM_SAMPLES)
    return halved, make_plain_copy(halved, folder / "plain")


def batches(path: Any, **options: Any) -> Iterator[list[torch.Tensor]]:
    with ShardLoader(path, 5, device="cpu", return_indices=True, seed=3, **options) as loader:
        for batch in loader:
            yield [tensor.clone() for tensor in flat(batch)]


def assert_same(one: Iterator[list[torch.Tensor]], other: Iterator[list[torch.Tensor]]) -> None:
    for found, expected in zip(one, other, strict=True):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_batches_are_those_of_plain_pixels(transform: Any, pair: tuple[Path, Path]) -> None:
    halved, plain = pair
    for io, check in (("mmap", "off"), ("mmap", "sample"), ("pread", "off"), ("direct", "sample")):
        found = batches(halved, io=io, check=check, transform=transform)
        assert_same(found, batches(plain, transform=transform))


@pytest.mark.parametrize("transform", [None, CROP], ids=["none", "crops"])
def test_batches_from_a_copy_that_is_being_made_are_those_of_plain_pixels(
    transform: Any, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    halved, plain = pair
    for _ in range(2):  # the second time, the copy is there
        assert_same(batches(halved, cache=tmp_path, transform=transform), batches(plain, transform=transform))


def test_sets_of_both_kinds_are_mixed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = make_plain_copy(make_halved_set(tmp_path / "others", 20, seed=1), tmp_path / "other")
    for transform, columns in ((None, slice(None)), (CenterCrop((10, 8)), slice(3, 11))):
        sets: dict[Any, float] = {str(pair[0]): 1.0, str(other): 2.0}
        with ShardLoader(sets, 5, epoch_batches=9, device="cpu", return_indices=True, transform=transform) as loader:
            for images, _, indices, more in loader:
                for image, index, source in zip(images, indices.tolist(), more["source"].tolist(), strict=True):
                    stored = loader.shards.sets[source][index - int(loader.shards.starts[source])].image  # type: ignore[union-attr]
                    assert np.array_equal(image.permute(1, 2, 0).numpy(), stored[:, columns])


def test_a_boxed_crop_is_filtered_from_the_planes(pair: tuple[Path, Path]) -> None:
    """Close to the crop of the picture, and not equal: the picture's colors would be filtered twice."""
    halved, plain = pair
    transform = RandomResizedCrop(8)
    found = [batch[0] for batch in batches(halved, transform=transform)]
    expected = [batch[0] for batch in batches(plain, transform=transform)]
    difference = (torch.cat(found).int() - torch.cat(expected).int()).abs()
    assert 0 < difference.float().mean() < 10


def test_windows_and_items_are_parts_of_the_picture(pair: tuple[Path, Path]) -> None:
    halved, plain = (open_shards(path) for path in pair)
    rng = np.random.default_rng(5)
    indices = rng.integers(0, NUM_SAMPLES, 200)
    tops, lefts = rng.integers(0, SHAPE[0], 200), rng.integers(0, SHAPE[1], 200)
    heights, widths = rng.integers(1, SHAPE[0] - tops + 1), rng.integers(1, SHAPE[1] - lefts + 1)
    windows = Windows(tops, lefts, heights, widths)
    found, expected = (np.empty(int(windows.num_pixels.sum()) * 3, np.uint8) for _ in range(2))
    halved.gather(indices, found, windows)
    plain.gather(indices, expected, windows)
    np.testing.assert_array_equal(found, expected)
    items: Callable[[Path], Any] = ShardDataset
    for (image, label), (same, again) in zip(items(pair[0]), items(pair[1]), strict=True):
        assert torch.equal(image, same)
        assert label == again


def test_damage_is_found_by_the_checksum_of_the_stored_row(pair: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(pair[0], path)
    flip(path / "train-00001.npy")  # the last value of Cr of the last sample
    (problem,) = verify(path).problems
    (sample,) = problem.samples
    assert sample == sum(entry.num_samples for entry in open_shards(path).content.shards[:2]) - 1
    with (
        ShardLoader(path, 5, check="sample", device="cpu", shuffle=False) as loader,
        pytest.raises(FormatError, match=rf"train-00001\.npy: sample {sample} .*crc32"),
    ):
        list(loader)
