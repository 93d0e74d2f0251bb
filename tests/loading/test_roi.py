"""A loader that reads only what its transform sees gives the batches of one that reads whole pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from arrays import change_split, some_arrays
from copiers import FakeCopier, FakeTransfer, finish_some
from numpy.typing import NDArray
from pictures import random_picture
from PIL import Image

import shardio.loading.pipeline
from shardio.augment import (
    CenterCrop,
    ColorJitter,
    Compose,
    HorizontalFlip,
    Mixup,
    Normalize,
    Pad,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    ToDtype,
)
from shardio.augment.cut import Cut
from shardio.conversion.convert import convert
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.kernels.built import _resample
from shardio.loading.loader import ShardLoader
from shardio.loading.prefetch import Tensors
from shardio.reading.reader import MappedReader
from shardio.reading.shardset import ShardSet
from shardio.system.pour import direct_alignment

COUNT, HEIGHT, WIDTH = 53, 40, 36
USUAL = Compose([RandomResizedCrop(24), HorizontalFlip(), Normalize("imagenet")])
COLORED = Compose([RandomResizedCrop((20, 26)), ColorJitter(0.4), HorizontalFlip()])

pytestmark = pytest.mark.skipif(_resample is None, reason="installed without the native kernels")


@pytest.fixture(autouse=True)
def one_thread_of_torch() -> Iterator[None]:
    """So that one gather thread is enough."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def flat(batch: tuple[Any, ...]) -> list[torch.Tensor]:
    return [value for part in batch for value in (part.values() if isinstance(part, dict) else [part])]


def check(path: Path, transform: Any = USUAL, batch_size: int = 7, epochs: int = 2, **options: Any) -> None:
    """Compares every batch of both ways. A loader that compares checksums reads whole pictures."""
    options = {"device": "cpu", "tail": "short", "seed": 4, "return_indices": True, "num_threads": 2, **options}
    with (
        ShardLoader(path, batch_size, transform=transform, check="sample", **options) as whole,
        ShardLoader(path, batch_size, transform=transform, **options) as loader,
    ):
        assert (whole.stats()["roi"], loader.stats()["roi"]) == (False, True)
        for _ in range(epochs):
            for expected, found in zip(whole, loader, strict=True):
                for one, other in zip(flat(expected), flat(found), strict=True):
                    assert torch.equal(one, other)
                    assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert loader.stats()["read_nbytes"] < whole.stats()["read_nbytes"]


@pytest.mark.parametrize("io", ["mmap", "pread", "direct"])
@pytest.mark.parametrize("transform", [USUAL, COLORED], ids=["normalized", "colored"])
def test_every_reader_gives_the_same_batches(path: Path, io: str, transform: Any) -> None:
    if io == "direct" and direct_alignment(path / "train-00000.npy") is None:
        pytest.skip("O_DIRECT does not work here")
    check(path, transform, io=io)


@pytest.mark.parametrize(
    "options",
    [
        {"num_threads": 1, "prefetch": 0},
        {"num_threads": 5, "batch_size": 3},
        {"batch_size": COUNT},
        {"tail": "pad", "rank": 1, "world_size": 2},
        {"shuffle": False},
        {"weights": [1.0, 2.0] + [0.1] * (COUNT - 2), "epoch_batches": 5, "tail": "drop"},
        {"transform": Compose([RandomCrop(20), ToDtype(torch.float32)])},
        {"arrays": ["mask", "clip", "small"]},
        {"transform": Compose([RandomResizedCrop(24), Normalize(), Mixup(5)])},
        {"transform": Compose([Resize(32), CenterCrop(24)])},
    ],
    ids=repr,
)
def test_batches_are_the_same_whatever_else_is_asked_for(path: Path, options: dict[str, Any]) -> None:
    check(path, **options)


def test_windows_are_announced_with_their_batches(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    will_read = ShardSet.will_read

    def note(shards: ShardSet, indices: NDArray[np.int64], windows: Any = None, name: str = "") -> None:
        asked.append((name, HEIGHT * len(indices) if windows is None else int(windows.heights.sum())))
        will_read(shards, indices, windows, name)

    monkeypatch.setattr(ShardSet, "will_read", note)
    monkeypatch.setattr(MappedReader, "begin_epoch", lambda reader: True)
    check(path, io="mmap", epochs=1, arrays=["mask"])
    of = {name: [rows for array, rows in asked if array == name] for name in ("", "mask")}
    assert len(of[""]) == len(of["mask"]) == 2 * 8
    assert sum(of["mask"]) == 2 * COUNT * HEIGHT
    assert COUNT * HEIGHT < sum(of[""]) < 2 * COUNT * HEIGHT


def write_squashed(folder: Path, sizes: Any) -> Path:
    rng = np.random.default_rng(5)
    for i, size in enumerate(sizes):
        place = folder / "images" / "train" / f"class{i % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random_picture(rng, *size)).save(place / f"{i}.png")
    convert(folder / "images", folder / "out", size=48, fit="squash", workers=1)
    return folder / "out"


@pytest.mark.parametrize(
    "transform",
    [CenterCrop(56), Pad(2), lambda images: Pad(2)(images)],
    ids=["crop", "pad", "function"],
)
def test_an_empty_batch_of_squashed_pictures_has_the_shape_of_the_others(tmp_path: Path, transform: Any) -> None:
    path = write_squashed(tmp_path, [(60, 80)] * 4)
    options: dict[str, Any] = {"device": "cpu", "tail": "short", "world_size": 5, "transform": transform}
    shapes = []
    for rank in (0, 4):
        with ShardLoader(path, 1, rank=rank, **options) as loader:
            ((images, _),) = loader
            shapes.append(tuple(images.shape))
    assert shapes == [(0, *shapes[1][1:]), (1, *shapes[1][1:])]


def test_squashed_pictures_are_cut_as_they_were_before(tmp_path: Path) -> None:
    write_squashed(tmp_path, np.random.default_rng(5).integers(40, 90, (24, 2)).tolist())
    check(tmp_path / "out", batch_size=5)
    check(tmp_path / "out", Compose([Resize(36), CenterCrop(32), Normalize()]), batch_size=5)


@pytest.mark.parametrize("crop", [CenterCrop(48, "edge"), RandomCrop(48, pad_if_needed=True)], ids=repr)
def test_pictures_that_are_smaller_than_a_crop_get_its_border_in_a_loader(path: Path, crop: Any) -> None:
    options: dict[str, Any] = {"device": "cpu", "return_indices": True}
    with ShardLoader(path, 7, transform=crop, **options) as loader, ShardLoader(path, 7, **options) as plain:
        for (found, _, indices), (images, *_) in zip(loader, plain, strict=True):
            assert torch.equal(found, crop(images, indices=indices, seed=0, epoch=0))


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_transform_may_be_set_between_epochs_and_not_in_one(path: Path, io: str) -> None:
    changes: list[Any] = [USUAL, COLORED, None, lambda images: images[:, :, :4], Normalize(), USUAL]
    options: dict[str, Any] = {
        "device": "cpu",
        "seed": 4,
        "transform": USUAL,
        "num_threads": 2,
        "prefetch": 3,
        "io": io,
    }
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


@pytest.fixture
def far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders on the CPU copy to a device that is the CPU, too, and resamples only what came with the batch."""
    let_time_pass = finish_some(7)

    def resampled(cut: Cut, pixels: torch.Tensor, parameters: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        assert np.array_equal(parameters, cut.parameters)
        firsts, lines = places.numpy().T
        bottoms = cut.windows.tops + cut.windows.heights - 1
        last = (cut.windows.lefts + cut.windows.widths) * cut.num_channels
        assert np.array_equal(firsts + bottoms * lines + last, cut.ends[1:])
        images = cut.resampled(pixels)
        return images if cut.how.dtype is None else images.to(cut.how.dtype)

    def hand_over(transfer: FakeTransfer) -> Tensors:
        if not transfer.finished:
            transfer.wait()
        return hand_over_later(transfer)

    hand_over_later = FakeTransfer.hand_over
    monkeypatch.setattr(FakeTransfer, "hand_over", hand_over)  # what is on the host looks at the device's memory
    monkeypatch.setattr(shardio.loading.pipeline, "make_copier", lambda device: FakeCopier(let_time_pass))
    monkeypatch.setattr(Cut, "resampled_on_cuda", resampled)


@pytest.mark.usefixtures("far_away")
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("io", ["direct", "pread"])
def test_windows_go_to_a_device_with_what_its_kernel_is_told(path: Path, io: str, prefetch: int) -> None:
    if io == "direct" and direct_alignment(path / "train-00000.npy") is None:
        pytest.skip("O_DIRECT does not work here")
    check(path, Compose([RandomResizedCrop(24), ToDtype(torch.float16)]), io=io, prefetch=prefetch)
    check(path, COLORED, io=io, prefetch=prefetch, arrays=["mask"])


@pytest.mark.usefixtures("far_away")
@pytest.mark.parametrize(("io", "windows"), [("mmap", False), ("auto", False), ("pread", True)])
def test_a_device_gets_windows_only_if_they_come_from_storage(path: Path, io: Any, windows: bool) -> None:
    with ShardLoader(path, 7, device="cpu", transform=USUAL, io=io, num_threads=2) as loader:
        assert loader.stats()["roi"] is windows
        assert loader.stats()["io"] == ("pread" if windows else "mmap")


@pytest.mark.usefixtures("far_away")
def test_a_set_larger_than_memory_goes_to_a_device_in_windows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.reading.choose.memory_left", lambda: 1)
    monkeypatch.setattr("shardio.reading.choose.resident_share_of", lambda *_: 0.5)
    with ShardLoader(path, 7, device="cpu", transform=USUAL, num_threads=2) as loader:
        assert loader.stats()["roi"] is True
        assert loader.stats()["io"] in ("direct", "pread")


@pytest.mark.usefixtures("far_away")
def test_a_transform_may_be_set_between_epochs_on_a_device(path: Path) -> None:
    test_a_transform_may_be_set_between_epochs_and_not_in_one(path, "pread")


def test_held_batches_stay_as_they_are_and_a_steady_loop_makes_no_new_slot(path: Path) -> None:
    with ShardLoader(path, 5, device="cpu", transform=USUAL, num_threads=2) as loader:
        held = list(loader)
        copies = [images.clone() for images, _ in held]
        assert loader.stats()["slots"] >= len(held)
        for _ in loader:
            pass
        assert all(torch.equal(images, copy) for (images, _), copy in zip(held, copies, strict=True))
        made = loader.stats()["slots"]
        del held, _
        for _ in range(2):
            for _images, _labels in loader:
                pass
        assert loader.stats()["slots"] == made


@pytest.mark.parametrize(
    "options",
    [
        {"check": "sample"},
        {"transform": None},
        {"transform": torch.clone},
        {"transform": Normalize()},
    ],
    ids=["checked", "none", "another", "of pixels"],
)
def test_whole_pictures_are_read_where_they_are_needed(path: Path, options: dict[str, Any]) -> None:
    with ShardLoader(path, 5, device="cpu", **{"transform": USUAL, **options}) as loader:
        list(loader)
        stats = loader.stats()
        assert stats["roi"] is False
        assert stats["read_nbytes"] == 10 * 5 * HEIGHT * WIDTH * 3


def test_gather_threads_take_the_place_of_torchs_only_if_there_are_as_many(path: Path) -> None:
    torch.set_num_threads(3)
    for num_threads, roi, made in ((2, False, 2), (3, True, 3), (None, True, 3)):
        with ShardLoader(path, 5, device="cpu", transform=USUAL, num_threads=num_threads) as loader:
            assert (loader.stats()["roi"], loader.stats()["num_threads"] >= made) == (roi, True)
    torch.set_num_threads(40)
    with ShardLoader(path, 5, device="cpu", transform=USUAL) as loader:
        assert loader.stats()["roi"] is False
        assert loader.stats()["num_threads"] < 40


def test_what_a_cut_raises_is_raised_where_the_batch_was_due(path: Path) -> None:
    with ShardLoader(path, 5, device="cpu", transform=CenterCrop(38), num_threads=1) as loader:
        with pytest.raises(ValueError, match="does not fit"):
            next(iter(loader))
        loader.transform = CenterCrop(36)
        assert next(iter(loader))[0].shape == (5, 3, 36, 36)
