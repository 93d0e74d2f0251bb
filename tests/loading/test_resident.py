"""A split in the device's memory gives the batches that reading gives: the same bytes, order and states."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from arrays import Given, change_split, some_arrays
from copiers import FakeCopier
from numpy.lib.recfunctions import append_fields

import shardio.cache.cached_split
import shardio.loading.device
import shardio.loading.loader
import shardio.loading.resident
from shardio.augment import Compose, HorizontalFlip, Mixup, Normalize, RandomResizedCrop
from shardio.cache.stage import stage
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.errors import FormatError
from shardio.format.entries import ShardEntry
from shardio.format.layout import ARRAY_TYPES, HEADER_NBYTES, RowType
from shardio.format.manifest_file import commit_manifest
from shardio.loading.device import memory_free
from shardio.loading.loader import ShardLoader
from shardio.loading.resident import DeviceWindows, Rows, crop_boxes_there
from shardio.order.windows import Windows, crop_boxes
from shardio.reading.shardset import open_shards
from shardio.sets.rows import write_index

NUM_SAMPLES, HEIGHT, WIDTH = 23, 6, 5
CPU = torch.device("cpu")
RNG = np.random.default_rng(5)
ARRAYS: dict[str, Given] = {
    **some_arrays(NUM_SAMPLES, HEIGHT, WIDTH),
    "small": ("image", RNG.integers(0, 256, (NUM_SAMPLES, 4, 3, 3), dtype=np.uint8)),
}
NAMES = [name for name in ARRAYS if name != "small"]
MOVED = Compose([RandomResizedCrop(4), HorizontalFlip(), Normalize("imagenet")])
AUGMENTED = Compose([MOVED, Mixup(7, alpha=0.4)])
Batches = list[tuple[Any, ...]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set with arrays of every kind, a column and pictures that were squashed."""
    out = tmp_path_factory.mktemp("resident") / "set"
    nbytes = HEADER_NBYTES + 10 * HEIGHT * WIDTH * 3
    with ShardWriter(out, (HEIGHT, WIDTH, 3), classes=list("abcdefg"), shard_nbytes=nbytes) as writer:
        for i in range(NUM_SAMPLES):
            writer.append(RNG.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8), i % 7)
    manifest = change_split(out, ARRAYS)
    content = manifest.splits["train"]
    rows = np.fromfile(out / content.index.file, content.index.dtype, offset=HEADER_NBYTES)
    rows["source_width"], rows["source_height"] = RNG.integers(20, 90, (2, NUM_SAMPLES))
    rows = append_fields(rows, ["score"], [np.linspace(-1, 1, NUM_SAMPLES)], usemask=False)
    content = replace(content, index=write_index(out, "train", rows))
    commit_manifest(out, replace(manifest, splits={"train": replace(content, squashed=True)}))
    return out


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four samples or fewer."""
    monkeypatch.setattr(shardio.loading.resident, "_PIECE_NBYTES", 400)


def loader_of(path: Path, batch_size: int = 4, *, resident: bool = True, **options: Any) -> ShardLoader:
    usual: dict[str, Any] = {"device": "cpu", "return_indices": True, "seed": 3, "num_threads": 2}
    return ShardLoader(path, batch_size, **{**usual, **options}, resident="device" if resident else None)


def assert_same(found: Batches, expected: Batches) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            pairs = [(left[name], right[name]) for name in right] if isinstance(right, dict) else [(left, right)]
            for tensor, same in pairs:
                assert tensor.dtype == same.dtype
                assert not tensor.numel() or tensor.stride() == same.stride()
                np.testing.assert_array_equal(tensor.numpy(), same.numpy())


def assert_equal_loaders(path: Path, epochs: int = 2, **options: Any) -> None:
    with loader_of(path, **options) as loader, loader_of(path, resident=False, **options) as usual:
        for _ in range(epochs):
            assert_same(list(loader), list(usual))
            assert loader.num_repeats == usual.num_repeats
            assert loader.state_dict() == usual.state_dict()


SUBSET = [20, 3, 3, 7, 11, 0, 22, 15, 9]
ORDERS: list[dict[str, Any]] = [
    {"shuffle": False},
    {"shuffle": "block", "block_size": 2, "window_blocks": 3},
    {"indices": SUBSET},
    {"indices": [7, 8], "batch_size": 2},
    {"weights": np.arange(NUM_SAMPLES), "num_draws": 17},
    {"weights": np.arange(9), "indices": SUBSET, "shuffle": True},
    *({"tail": tail, "batch_size": size} for tail in ("drop", "pad", "short") for size in (1, 5, 23, 30) if size < 30),
    {"tail": "short", "batch_size": 30},
    {"tail": "short", "batch_size": 12, "rank": 1, "world_size": 2, "shuffle": False},
    {"tail": "short", "batch_size": 8, "rank": 0, "world_size": 3, "indices": [4, 5]},
]
CONTENTS: list[dict[str, Any]] = [
    {"arrays": NAMES, "columns": ["score", "crc32", "source_width"]},
    {"arrays": NAMES, "crop": (4, 3)},
    {"arrays": NAMES, "crop": (4, 3), "crop_at": "random", "indices": SUBSET},
    {"crop": 5, "crop_at": "random", "transform": AUGMENTED},
    {"images_from": "small", "columns": ["score"]},
    {"images_from": "small", "crop": (2, 3), "crop_at": "random"},
    {"transform": MOVED, "arrays": ["mask", "boxes"], "tail": "pad"},
    {"transform": AUGMENTED, "weights": np.arange(NUM_SAMPLES)},
    {"transform": lambda images: images * 2},
    {"return_indices": False},
    {"check": "sample"},
    {"check": "sample", "crop": 3, "crop_at": "random", "arrays": ["depth"]},
    {"io": "pread"},
    {"prefetch": 0},
]


@pytest.mark.parametrize("options", [*ORDERS, *CONTENTS])
def test_batches_are_those_of_a_loader_that_reads(path: Path, options: dict[str, Any]) -> None:
    assert_equal_loaders(path, **options)


def test_states_are_exchanged_with_loaders_that_read_in_the_middle_of_an_epoch(path: Path) -> None:
    options: dict[str, Any] = {"tail": "short", "transform": AUGMENTED}
    with loader_of(path, resident=False, **options) as usual:
        expected = list(usual)
    for stop, first in itertools.product(range(7), (True, False)):
        with loader_of(path, resident=first, **options) as loader:
            batches = list(itertools.islice(loader, stop))
            state = loader.state_dict()
        with loader_of(path, resident=not first, **options) as loader:
            loader.load_state_dict(state)
            # The state before the first batch, and after the last, are those of `islice`, which asks for no more.
            assert_same([*batches, *loader], expected)


def test_everything_is_read_once_in_stored_order_whatever_is_drawn(path: Path) -> None:
    with loader_of(path, indices=SUBSET, arrays=["mask"], io="pread") as loader:
        asked: list[int] = []
        read = loader._pipeline._reader.read
        loader._pipeline._reader.read = lambda indices, *rest: (asked.extend(indices), read(indices, *rest))  # type: ignore[method-assign,assignment,func-returns-value]
        for _ in range(3):
            list(loader)
        assert sorted(asked) == sorted(set(SUBSET))
        stats = loader.stats()
        row_nbytes = HEIGHT * WIDTH * 3 + HEIGHT * WIDTH
        assert stats["read_nbytes"] == 8 * row_nbytes
        assert stats["resident_nbytes"] == 8 * (row_nbytes + 16)
        assert stats["slots_free"] == 0
        assert loader.report().source.io == "resident"


def test_the_wait_for_the_memory_is_that_for_the_first_batch(path: Path) -> None:
    with loader_of(path) as loader:
        next(iter(loader))
        stats = loader.stats()
        assert stats["wait_seconds"] == stats["first_wait_seconds"] > 0


def test_a_window_in_the_centre_is_all_that_is_stored(path: Path) -> None:
    for at, nbytes in (("center", 4 * 3 * 3), ("random", HEIGHT * WIDTH * 3)):
        with loader_of(path, crop=(4, 3), crop_at=at) as loader:
            assert loader.stats()["resident_nbytes"] == NUM_SAMPLES * (nbytes + 8)
            assert "(4, 3, 3)" in repr(loader)


def test_the_memory_comes_through_slots_and_copies_where_the_device_needs_them(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = list(loader_of(path, arrays=NAMES, resident=False))
    copier = FakeCopier(lambda copier: copier.synchronize())
    monkeypatch.setattr(shardio.loading.loader, "make_copier", lambda device: copier)
    with loader_of(path, arrays=NAMES) as loader:
        assert_same(list(loader), expected)
        assert copier.started == -(-NUM_SAMPLES // loader._pipeline.resident.sampler.batch_size) > 3  # type: ignore[union-attr]
        list(loader)
        assert copier.started == -(-NUM_SAMPLES // loader._pipeline.resident.sampler.batch_size)  # type: ignore[union-attr]


def test_batches_are_the_callers_own(path: Path) -> None:
    with loader_of(path, arrays=NAMES) as loader, loader_of(path, arrays=NAMES, resident=False) as usual:
        for batch in loader:
            for tensor in [*batch[:3], *batch[3].values()]:
                tensor.zero_()
        kept = list(loader)
        list(usual)
        loader.close()
        assert_same(kept, list(usual))


def test_two_iterators_share_the_memory(path: Path) -> None:
    with loader_of(path, shuffle=False) as loader, loader_of(path, shuffle=False, resident=False) as usual:
        one, other = iter(loader), iter(loader)
        found = [batch for pair in zip(one, other, strict=True) for batch in pair]
        assert_same(found[::2], list(usual))
        assert_same(found[1::2], list(usual))
        assert loader.stats()["read_nbytes"] == NUM_SAMPLES * HEIGHT * WIDTH * 3


def test_filling_that_was_interrupted_is_begun_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loader_of(path) as loader, loader_of(path, resident=False) as usual:
        put, calls = Rows.put, itertools.count()

        def interrupted(rows: Rows, start: int, values: torch.Tensor) -> None:
            if next(calls) == 3:
                raise KeyboardInterrupt
            put(rows, start, values)

        monkeypatch.setattr(Rows, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
        assert loader.state_dict()["consumed"] == 0
        loader.set_epoch(0)
        assert_same(list(loader), list(usual))


def test_the_memory_is_filled_through_a_cache_that_copies_in_the_same_order(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[ShardEntry] = []

    def by_need(*arguments: Any) -> list[ShardEntry]:
        needed.extend(real(*arguments))
        return needed

    real = shardio.cache.cached_split._by_need
    monkeypatch.setattr(shardio.cache.cached_split, "_by_need", by_need)
    with loader_of(path, resident=False) as usual:
        expected = list(usual)
    with loader_of(path, cache=tmp_path / "cache") as loader:
        assert_same(list(loader), expected)  # while the copy is made
        assert needed == list(loader.shards.content.shards)
    stage(path, tmp_path / "cache")
    with loader_of(path, cache=tmp_path / "cache") as loader:
        assert_same(list(loader), expected)


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(make_set: Callable[..., Path]) -> Path:
    """Samples 3 and 16 to 19 have a wrong byte."""
    out = make_set(NUM_SAMPLES)
    shards = open_shards(out)
    for sample in (3, 16, 17, 18, 19):
        entry, offset = shards.locate_one(sample)
        with (out / entry.file).open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 1]))
    return out


@pytest.mark.parametrize("crop_at", [None, "center", "random"])
@pytest.mark.filterwarnings("ignore:sample")
def test_other_samples_take_the_places_of_damaged_ones(damaged: Path, crop_at: str | None) -> None:
    crop = {} if crop_at is None else {"crop": 4, "crop_at": crop_at}
    options = {"check": "sample", "on_damage": "skip", "transform": AUGMENTED, "batch_size": 7, "tail": "short", **crop}
    assert_equal_loaders(damaged, **options)
    with loader_of(damaged, **options) as loader:
        next(iter(loader))
        assert loader.damaged == [3, 16, 17, 18, 19]


def test_a_damaged_sample_is_an_error_of_the_first_batch(damaged: Path) -> None:
    with loader_of(damaged, check="sample", shuffle=False) as loader:
        with pytest.raises(FormatError, match=r"train-00000\.npy: sample 3"):
            next(iter(loader))
        assert loader.state_dict()["consumed"] == 0


@pytest.mark.filterwarnings("ignore:sample")
def test_a_batch_without_a_sound_sample_is_an_error_when_it_is_due(damaged: Path) -> None:
    with loader_of(damaged, check="sample", on_damage="skip", shuffle=False) as loader:
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        with pytest.raises(FormatError, match="none of the 4 samples"):
            next(batches)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_a_split_that_does_not_fit_is_refused_with_both_sizes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need = NUM_SAMPLES * (HEIGHT * WIDTH * 3 + 8)
    monkeypatch.setattr(shardio.loading.device, "memory_left", lambda: need - 1)
    with pytest.raises(MemoryError, match=r"set, train: 23 samples take 2\.25 kB, and cpu has 2\.25 kB left: take"):
        loader_of(path)
    for left in (need, None):
        monkeypatch.setattr(shardio.loading.device, "memory_left", lambda left=left: left)
        with loader_of(path) as loader:
            assert len(list(loader)) == 5


def test_memory_that_is_there_but_in_pieces_is_too_little(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(Rows, "__init__", refuse)
    with pytest.raises(MemoryError, match="23 samples take"):
        loader_of(path)


def test_what_torch_keeps_for_reuse_counts_as_left(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"mem_get_info": (1000, 9000), "memory_reserved": 500, "memory_allocated": 200}
    for name, value in found.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert memory_free(torch.device("cuda", 0)) == 1300


def test_closing_gives_the_memory_back_and_ends_iterators(path: Path) -> None:
    loader = loader_of(path)
    batches = iter(loader)
    kept = next(batches)
    resident = loader._pipeline.resident
    assert resident is not None
    memory = weakref.ref(resident._tables.images.memory)  # type: ignore[union-attr]
    loader.close()
    assert memory() is None
    assert kept[0].any()
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)
    with pytest.raises(RuntimeError, match="closed"):
        resident.gather(np.arange(2), 0)
    loader.close()


def test_a_loader_that_is_forgotten_gives_the_memory_back(path: Path) -> None:
    loader = loader_of(path)
    next(iter(loader))
    memory = weakref.ref(loader._pipeline.resident._tables.images.memory)  # type: ignore[union-attr]
    del loader
    assert memory() is None


def test_batches_may_be_asked_for_inside_and_outside_of_inference_mode(path: Path) -> None:
    with loader_of(path) as loader, loader_of(path, resident=False) as usual:
        for first in (True, False):
            with torch.inference_mode(first):
                found = [tuple(tensor.clone() for tensor in next(iter(loader)))]
            assert_same(found, [next(iter(usual))])


def test_what_resident_may_be_is_told(path: Path) -> None:
    with pytest.raises(ValueError, match="resident must be \"device\" or None; found 'node'"):
        ShardLoader(path, 4, device="cpu", resident="node")  # type: ignore[arg-type]


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ARRAY_TYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (8,), (2, 3), (5, 4, 3), (3, 2, 1, 2)])
def test_rows_of_every_type_and_length_come_back_as_they_are(dtype: str, shape: tuple[int, ...]) -> None:
    row = RowType(dtype, shape)
    data = np.frombuffer(np.random.default_rng(1).bytes(11 * row.nbytes), np.uint8)
    values = (data & 1 if dtype == "|b1" else data).view(dtype).reshape(11, *shape)
    rows = Rows(11, row, CPU)
    for start in range(0, 11, 4):
        rows.put(start, torch.from_numpy(values[start : start + 4].copy()))
    for numbers in ([], [3], [10, 0, 0, 5]):
        found = rows.take(torch.tensor(numbers, dtype=torch.int64)).numpy()
        assert found.dtype == values.dtype
        assert found.tobytes() == values[numbers].tobytes()
        assert found.shape == values[numbers].shape


@pytest.mark.parametrize(
    ("dtype", "shape"), [("|u1", (5, 4, 3)), ("<u2", (5, 4)), ("|u1", (5, 4, 4)), ("<f8", (5, 4, 2))]
)
def test_windows_of_every_size_and_place_are_cut_as_numpy_cuts_them(dtype: str, shape: tuple[int, ...]) -> None:
    values = np.arange(3 * np.prod(shape)).astype(dtype).reshape(3, *shape)
    rows = Rows(3, RowType(dtype, shape), CPU)
    rows.put(0, torch.from_numpy(values))
    for height, width in itertools.product(range(1, 6), range(1, 5)):
        places = list(itertools.product(range(3), range(6 - height), range(5 - width)))
        numbers, tops, lefts = torch.tensor(places).unbind(1)
        found = rows.take_windows(numbers, DeviceWindows(height, width, tops, lefts))
        expected = [values[number, top : top + height, left : left + width] for number, top, left in places]
        assert np.array_equal(found.numpy(), np.stack(expected))


def test_boxes_are_moved_into_windows_as_on_the_host() -> None:
    rng = np.random.default_rng(2)
    boxes = rng.uniform(-3, 12, (500, 4, 5)).astype(np.float32)
    boxes[:, :, 4] = rng.integers(-1, 3, (500, 4))
    boxes[:9, 0, :] = np.array([np.nan, np.inf, -np.inf])[rng.integers(0, 3, (9, 5))]
    tops, lefts = rng.integers(0, 5, (2, 500))
    found = torch.from_numpy(boxes.copy())
    crop_boxes_there(found, DeviceWindows(6, 7, torch.from_numpy(tops), torch.from_numpy(lefts)))
    crop_boxes(boxes, Windows.alike(6, 7, tops, lefts))
    assert 0 < (boxes[:, :, 4] >= 0).sum() < 4 * 500
    np.testing.assert_array_equal(found.numpy(), boxes)
