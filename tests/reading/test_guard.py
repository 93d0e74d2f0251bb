"""Training on a set that is damaged: an error that names the sample, or another sample in its place, and no wrong pixel
in a batch."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import flip
from numpy.typing import NDArray
from pictures import sample_pixels
from simulated_cuda import Simulation

import shardio.kernels.built
import shardio.kernels.rowread
import shardio.loading.cuda
import shardio.loading.pipeline
import shardio.reading.file_reader
import shardio.reading.guard
import shardio.reading.mapped_table
from shardio.errors import FormatError
from shardio.format import opening
from shardio.format.entries import FileEntry
from shardio.format.manifest_file import load_manifest
from shardio.loading.dataset import ShardDataset
from shardio.loading.loader import ShardLoader
from shardio.loading.ring import Slot
from shardio.order.rng import make_keys, uniform
from shardio.reading.choose import Io
from shardio.reading.file_reader import FileReader
from shardio.reading.reader import MappedReader
from shardio.reading.shardset import open_shards
from shardio.system import pour
from shardio.system.direct import direct_alignment

NUM_SAMPLES = 47
PER_SHARD = 10
SHAPE = (6, 5, 3)
NBYTES = 90
IOS: list[Io] = ["mmap", "pread", "direct"]
MakeLoader = Callable[..., ShardLoader]
Seen = list[tuple[list[int], list[int]]]
"""For each batch, the indices that the order asks for and those that came."""


@pytest.fixture
def path(make_set: Callable[..., Path]) -> Path:
    return make_set(NUM_SAMPLES, SHAPE, PER_SHARD)


@pytest.fixture
def loader_of(path: Path) -> Iterator[MakeLoader]:
    """loader_of(io, ...): a loader on the CPU of 47 samples in five shards, closed in the end."""
    with contextlib.ExitStack() as stack:

        def make(io: Io = "mmap", batch_size: int = 8, **options: Any) -> ShardLoader:
            if io == "direct" and direct_alignment(path / "train-00000.npy") is None:
                pytest.skip("O_DIRECT does not work here")
            options = {"device": "cpu", "return_indices": True, "tail": "short", "check": "sample", **options}
            return stack.enter_context(ShardLoader(path, batch_size, io=io, **options))

        yield make


def change(path: Path, *samples: int) -> None:
    """One bit of each of these samples."""
    for i in samples:
        with (path / f"train-{i // PER_SHARD:05d}.npy").open("r+b") as file:
            at = 4096 + i % PER_SHARD * NBYTES + i % NBYTES
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << i % 8]))


def pictures(indices: list[int]) -> NDArray[np.uint8]:
    return np.stack([sample_pixels(i, SHAPE) for i in indices])


def read_all(loader: ShardLoader, epochs: int = 1) -> Seen:
    """Every batch, whose pixels and labels must be those of its indices."""
    seen: Seen = []
    for _ in range(epochs):
        iterator = iter(loader)
        order = loader._position.sampler.batches(iterator.epoch)
        for images, labels, indices in iterator:
            came = indices.tolist()
            asked = next(order)
            assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), pictures(came))
            assert labels.tolist() == [i % 7 for i in came]
            seen.append((asked.tolist(), came))
    return seen


def expected_instead(asked: list[int], damaged: set[int], seed: int, epoch: int) -> list[int]:
    """Finds the replacements one by one, as the docstring of ShardLoader defines them."""
    sound = [i for i in asked if i not in damaged]
    (key,) = make_keys(b"shardio damage 1", seed, epoch, 1)
    drawn = [float(uniform(key, np.array([i], np.uint64))[0]) for i in asked]
    return [sound[int(u * len(sound))] if i in damaged else i for i, u in zip(asked, drawn, strict=True)]


# --- sound sets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_damage", ["raise", "skip"])
@pytest.mark.parametrize("io", IOS)
def test_a_sound_set_gives_the_same_batches_with_and_without_a_check(
    io: Io, on_damage: str, loader_of: MakeLoader
) -> None:
    plain = loader_of(io, check="off", seed=3)
    checked = loader_of(io, on_damage=on_damage, seed=3)
    for one, other in zip(plain, checked, strict=True):
        assert all(itertools.starmap(torch.equal, zip(one, other, strict=True)))
    assert checked.damaged == []
    assert checked.stats()["damaged"] == checked.stats()["read_retries"] == 0


# --- on_damage="raise" -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("io", IOS)
def test_a_changed_sample_is_an_error_where_its_batch_was_due_that_names_it(
    io: Io, path: Path, loader_of: MakeLoader
) -> None:
    change(path, 26)
    loader = loader_of(io, shuffle=False)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    with pytest.raises(FormatError) as caught:
        next(batches)
    crcs = [zlib.crc32(pixels) for pixels in (sample_pixels(26, SHAPE).tobytes(), stored(path, 26))]
    assert str(caught.value).startswith(
        f"{path / 'train-00002.npy'}: sample 26 (c5/26.png) at byte {4096 + 6 * NBYTES}: crc32: "
        f"expected {crcs[0]:08x}, found {crcs[1]:08x}"
    )
    for way_out in ("`shardio verify`", 'on_damage="skip"'):
        assert way_out in str(caught.value)
    assert loader.damaged == []
    change(path, 26)  # mended
    assert len(read_all(loader_of(io, shuffle=False))) == 6


def stored(path: Path, i: int) -> bytes:
    data = (path / f"train-{i // PER_SHARD:05d}.npy").read_bytes()
    return data[4096 + i % PER_SHARD * NBYTES :][:NBYTES]


@pytest.mark.parametrize("io", IOS)
def test_every_single_changed_sample_is_found(io: Io, path: Path, loader_of: MakeLoader) -> None:
    for i in range(NUM_SAMPLES):
        change(path, i)
        with pytest.raises(FormatError, match=rf"sample {i} \("):
            list(loader_of(io, num_threads=2))
        change(path, i)


def test_without_a_check_pixels_are_delivered_as_they_are(path: Path, loader_of: MakeLoader) -> None:
    change(path, 3)
    for on_damage in ("raise", "skip"):
        loader = loader_of(check="off", on_damage=on_damage, shuffle=False)
        images = next(iter(loader))[0]
        assert images[3].permute(1, 2, 0).numpy().tobytes() == stored(path, 3)
        assert loader.damaged == []


@pytest.mark.parametrize("check", ["off", "sample"])
@pytest.mark.parametrize("field", ["label", "key", "source_width", "crc32"])
def test_damage_in_the_index_is_not_trained_on(path: Path, loader_of: MakeLoader, field: str, check: str) -> None:
    dtype = load_manifest(path).splits["train"].index.dtype
    flip(path / "train-index.npy", 4096 + 5 * dtype.itemsize + dtype.fields[field][1])  # type: ignore[index]
    for io in IOS:
        with pytest.raises(FormatError, match=r"train-index\.npy: sha256"):
            loader_of(io, check=check, on_damage="skip")
    with pytest.raises(FormatError, match=r"train-index\.npy: sha256"):
        ShardDataset(path)


@pytest.mark.parametrize("io", ["pread", "direct"])
def test_an_index_that_takes_the_place_of_the_one_that_was_checked_is_checked_too(
    path: Path, loader_of: MakeLoader, io: Io
) -> None:
    loader = loader_of(io)
    index = path / "train-index.npy"
    shutil.copy(index, path / "other")
    flip(path / "other", 4096)
    (path / "other").replace(index)
    with pytest.raises(FormatError, match=r"train-index\.npy: sha256"):
        next(iter(loader))


@pytest.mark.parametrize("io", IOS)
def test_an_index_is_read_once_to_be_checked_however_often_it_is_opened(
    path: Path, loader_of: MakeLoader, io: Io, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []
    check_sha256 = opening.check_sha256

    def count(path: str, entry: FileEntry, found: str) -> None:
        checked.append(entry.file)
        check_sha256(path, entry, found)

    monkeypatch.setattr(opening, "check_sha256", count)
    read_all(loader_of(io))
    assert checked == ["train-index.npy"]


def test_storage_that_fails_while_an_index_is_checked_is_asked_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pour, "RETRY_SECONDS", (0.0, 0.0))
    failures = [None, None]
    preadv = os.preadv

    def fail(*arguments: Any) -> int:
        if failures:
            failures.pop()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", fail)
    assert len(open_shards(path)) == NUM_SAMPLES
    failures[:] = [None] * 99
    with pytest.raises(OSError, match=r"train-index\.npy"):
        open_shards(path)


# --- a fault that passes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_damage", ["raise", "skip"])
def test_a_fault_that_is_gone_when_the_sample_is_read_again_does_no_harm(
    on_damage: str, loader_of: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = MappedReader.copy

    def spoil(reader: MappedReader, name: str, indices: NDArray[np.int64], out: NDArray[np.uint8], *lines: Any) -> None:
        copy(reader, name, indices, out, *lines)
        for place in np.flatnonzero(np.isin(indices, [3, 30])):
            out[place, 0, 0, 0] ^= 64

    monkeypatch.setattr(MappedReader, "copy", spoil)
    loader = loader_of("mmap", on_damage=on_damage)
    for asked, came in read_all(loader, 2):
        assert came == asked
    assert loader.damaged == []
    assert loader.stats()["read_retries"] == 4
    assert loader.stats()["read_nbytes"] >= 2 * NUM_SAMPLES * NBYTES + 4 * NBYTES


def test_a_sample_is_read_again_past_the_page_cache_where_that_works(path: Path, loader_of: MakeLoader) -> None:
    loader = loader_of("mmap")
    ((_, guard),) = loader._pipeline._guards
    assert isinstance(guard._second, FileReader)
    possible = direct_alignment(path / "train-00000.npy") is not None
    assert guard._second.name == ("direct" if possible else "pread")


# --- on_damage="skip" ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("io", IOS)
def test_a_damaged_sample_is_replaced_by_the_sound_one_of_its_batch_that_seed_epoch_and_sample_say(
    io: Io, num_threads: int, path: Path, loader_of: MakeLoader
) -> None:
    damaged = {0, 7, 11, 12, 13, 14, 46}
    change(path, *damaged)
    loader = loader_of(io, num_threads=num_threads, on_damage="skip", seed=5)
    with pytest.warns(RuntimeWarning, match="is damaged, and another takes its place") as warned:
        seen = read_all(loader, 3)
    for number, (asked, came) in enumerate(seen):
        assert came == expected_instead(asked, damaged, 5, number // 6)
    told = sorted(int(re.match(r"sample (\d+) is damaged", str(warning.message))[1]) for warning in warned)  # type: ignore[index]
    assert told == loader.damaged == sorted(damaged)  # each once, though it came three times
    assert loader.stats()["damaged"] == len(damaged)
    assert loader.stats()["images"] == 3 * NUM_SAMPLES


@pytest.mark.filterwarnings("ignore:sample")
@pytest.mark.parametrize("io", IOS)
def test_samples_that_are_in_a_batch_twice_are_both_replaced(io: Io, path: Path, loader_of: MakeLoader) -> None:
    change(path, 9)
    loader = loader_of(io, on_damage="skip", indices=[9, 1, 9, 20, 9, 30, 31, 9], batch_size=4, shuffle=False)
    seen = read_all(loader)
    assert [asked for asked, _ in seen] == [[9, 1, 9, 20], [9, 30, 31, 9]]
    for asked, came in seen:
        assert came == expected_instead(asked, {9}, 0, 0)


@pytest.mark.filterwarnings("ignore:sample")
@pytest.mark.parametrize("stop", [0, 1, 3, 6])
def test_a_state_goes_on_with_the_same_replacements(stop: int, path: Path, loader_of: MakeLoader) -> None:
    change(path, 5, 6, 40)
    whole = read_all(loader_of(on_damage="skip"), 2)
    loader = loader_of(on_damage="skip", prefetch=3)
    batches = iter(loader)
    came = [next(batches)[2].tolist() for _ in range(stop)]
    state = loader.state_dict()
    assert state == {**loader_of("pread").state_dict(), "consumed": 8 * stop if stop < 6 else NUM_SAMPLES, "epoch": 0}
    second = loader_of("pread", on_damage="skip")
    second.load_state_dict(state)
    came += [came for _, came in read_all_after(second)]
    assert came == [came for _, came in whole]


def read_all_after(loader: ShardLoader) -> Seen:
    """The rest of the epoch that a state says, and the one after it."""
    return [([], indices.tolist()) for _ in range(2) for _, _, indices in loader]


@pytest.mark.filterwarnings("ignore:sample")
def test_every_rank_gives_its_number_of_batches_and_replaces_within_its_own(path: Path, loader_of: MakeLoader) -> None:
    damaged = {1, 2, 3, 4, 33}
    change(path, *damaged)
    for rank in range(3):
        loader = loader_of(on_damage="skip", rank=rank, world_size=3, batch_size=4, tail="pad")
        seen = read_all(loader)
        assert len(seen) == len(loader) == 4
        for asked, came in seen:
            assert len(came) == 4
            assert came == expected_instead(asked, damaged, 0, 0)


@pytest.mark.filterwarnings("ignore:sample")
@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_batch_without_a_sound_sample_is_an_error_where_it_was_due(
    prefetch: int, path: Path, loader_of: MakeLoader
) -> None:
    change(path, *range(16, 24))
    loader = loader_of(on_damage="skip", shuffle=False, prefetch=prefetch)
    batches = iter(loader)
    for number in range(2):
        assert next(batches)[2].tolist() == list(range(8 * number, 8 * number + 8))
    with pytest.raises(FormatError, match=r"all 8 samples of a batch are damaged.* sample 16 \(c2/16\.png\) at"):
        next(batches)
    assert loader.state_dict()["consumed"] == 16


def test_warnings_that_are_errors_arrive_in_the_loop(path: Path, loader_of: MakeLoader) -> None:
    change(path, 0)
    loader = loader_of(on_damage="skip", shuffle=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="sample 0 is damaged"):
            next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    assert len(read_all(loader)) == 6


@pytest.mark.filterwarnings("ignore:sample")
def test_what_was_found_damaged_is_not_asked_for_again(
    path: Path, loader_of: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(path, 21)
    loader = loader_of("mmap", on_damage="skip")
    first = read_all(loader)
    asked: list[int] = []
    copy = MappedReader.copy

    def noting(reader: MappedReader, name: str, indices: NDArray[np.int64], *out: Any) -> None:
        asked.extend(indices.tolist())
        copy(reader, name, indices, *out)

    monkeypatch.setattr(MappedReader, "copy", noting)
    change(path, 21)  # mended: but batches under way must agree, so that a new loader is needed
    second = read_all(loader)
    assert sorted(asked) == [i for i in range(NUM_SAMPLES) if i != 21]
    assert all(21 not in came for _, came in [*first, *second])
    assert any(21 in came for _, came in read_all(loader_of("mmap", on_damage="skip")))


@pytest.mark.filterwarnings("ignore:sample")
def test_an_error_is_kept_as_text_so_that_no_batch_stays_in_memory(path: Path, loader_of: MakeLoader) -> None:
    change(path, 4, 44)
    loader = loader_of(on_damage="skip", prefetch=0, num_threads=1)
    for _ in range(3):
        for batch in loader:
            del batch
    assert loader.stats()["slots"] <= 2


# --- storage that does not give a sample -----------------------------------------------------------------------------


class LostSamples:
    """Makes all reads of these samples fail with this errno."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, samples: set[int], code: int) -> None:
        self.samples = samples
        self.code = code
        self.num_failures = 0
        self.copy_rows = shardio.kernels.rowcopy.copy_rows
        preadv, pread = os.preadv, os.pread
        monkeypatch.setattr(shardio.reading.mapped_table, "copy_rows", self.copy)
        monkeypatch.setattr(shardio.kernels.rowread, "_native", None)  # which reads without os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: self.judged(preadv, fd, buffers, at))
        monkeypatch.setattr(os, "pread", lambda fd, nbytes, at: self.judged(pread, fd, nbytes, at))

    def copy(self, rows: NDArray[np.uint8], numbers: NDArray[np.int64], out: NDArray[np.uint8]) -> int:
        """Copies the rows before a lost page."""
        if rows.shape[1] == NBYTES:  # otherwise it is the index
            lost = np.flatnonzero(np.isin(numbers, [self.row_of(i) for i in self.samples]))
            numbers = numbers[: lost[0]] if len(lost) else numbers
        return self.copy_rows(rows, numbers, out[: len(numbers)])

    def row_of(self, i: int) -> int:
        """Returns the sample's row in the mapping, where a shard's place is a whole number of pages and of rows."""
        return i // PER_SHARD * int(np.lcm(4096, NBYTES)) // NBYTES + i % PER_SHARD

    def judged(self, read: Callable[..., Any], fd: int, what: Any, at: int) -> Any:
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        nbytes = what if isinstance(what, int) else sum(len(buffer) for buffer in what)
        for i in self.samples:
            start = 4096 + i % PER_SHARD * NBYTES
            if name == f"train-{i // PER_SHARD:05d}.npy" and at < start + NBYTES and at + nbytes > start:
                self.num_failures += 1
                raise OSError(self.code, os.strerror(self.code))
        return read(fd, what, at)


@pytest.mark.filterwarnings("ignore:sample")
@pytest.mark.parametrize("check", ["off", "sample"])
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_samples_that_storage_does_not_give_are_replaced_after_all_attempts(
    io: Io, check: str, loader_of: MakeLoader, no_pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_of(io, check=check, on_damage="skip", num_threads=1, seed=2)
    lost = LostSamples(monkeypatch, {8, 9, 10, 41}, errno.EIO)
    for number, (asked, came) in enumerate(read_all(loader, 2)):
        assert came == expected_instead(asked, lost.samples, 2, number // 6)
    assert loader.damaged == sorted(lost.samples)
    # A sample has three pauses with the request that it was in, and three alone, in one epoch.
    assert len(no_pauses) <= 3 * 2 * len(lost.samples)
    if io == "pread":
        assert loader.stats()["read_retries"] == len(no_pauses)


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_lost_sample_is_told_with_file_byte_and_cause(
    io: Io, path: Path, loader_of: MakeLoader, no_pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_of(io, check="off", on_damage="skip", shuffle=False)
    LostSamples(monkeypatch, {12}, errno.EIO)
    with pytest.warns(RuntimeWarning, match="sample 12") as warned:
        list(loader)
    (warning,) = warned
    text = str(warning.message)
    for part in (str(path / "train-00001.npy"), f"sample 12 at byte {4096 + 2 * NBYTES} failed", "Input/output"):
        assert part in text
    assert warning.filename == __file__  # the line that asked for the batch


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ETIMEDOUT, errno.EACCES])
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_way_to_the_storage_that_is_cut_is_no_damage(
    io: Io, code: int, loader_of: MakeLoader, no_pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_of(io, on_damage="skip", check="off")
    LostSamples(monkeypatch, {12}, code)
    with pytest.raises(OSError, match="reading sample 12") as caught:
        list(loader)
    assert caught.value.errno == code
    assert loader.damaged == []


@pytest.mark.filterwarnings("ignore:sample")
@pytest.mark.skipif("plain" not in shardio.kernels.built.KERNELS, reason="installed without the native kernels")
@pytest.mark.parametrize("check", ["off", "sample"])
@pytest.mark.parametrize("io", IOS)
def test_what_was_cut_off_after_opening_is_replaced(
    io: Io, check: str, path: Path, loader_of: MakeLoader, make_set: Callable[..., Path]
) -> None:
    shape, nbytes = (64, 64, 1), 4096
    path = make_set(40, shape, 20)
    if io == "direct" and direct_alignment(path / "train-00000.npy") is None:
        pytest.skip("O_DIRECT does not work here")
    options: dict[str, Any] = {"check": check, "on_damage": "skip", "seed": 1, "num_threads": 2}
    with ShardLoader(path, 10, io=io, device="cpu", return_indices=True, **options) as loader:
        assert sorted(i for _, _, indices in loader for i in indices.tolist()) == list(range(40))
        os.truncate(path / "train-00001.npy", 4096 + 14 * nbytes)
        order = [batch.tolist() for batch in loader._position.sampler.batches(1)]
        for asked, (images, labels, indices) in zip(order, loader, strict=True):
            came = indices.tolist()
            assert came == expected_instead(asked, set(range(34, 40)), 1, 1)
            assert labels.tolist() == [i % 7 for i in came]
            assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), np.stack([sample_pixels(i, shape) for i in came]))
        assert loader.damaged == list(range(34, 40))


def test_an_index_that_is_lost_is_an_error_whatever_is_done_about_samples(path: Path, loader_of: MakeLoader) -> None:
    loader = loader_of("pread", on_damage="skip")
    os.truncate(path / "train-index.npy", 4096)
    with pytest.raises(FormatError, match=r"train-index\.npy: expected"):
        list(loader)


# --- batches that go to a device -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:sample")
def test_on_the_way_to_a_device_too_an_error_waits_until_its_batch_is_due(
    path: Path, loader_of: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(path, 3, *range(16, 24))
    monkeypatch.setattr(shardio.loading.cuda, "torch", Simulation(0, 1.0).torch())
    copier = shardio.loading.cuda.CudaCopier
    monkeypatch.setattr(shardio.loading.pipeline, "make_copier", lambda device: copier("simulated"))  # type: ignore[arg-type]
    loader = loader_of(on_damage="skip", shuffle=False, prefetch=3)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    with pytest.raises(FormatError, match="all 8 samples"):
        next(batches)
    assert loader.state_dict()["consumed"] == 16
    assert loader.damaged == [3, *range(16, 24)]
    del batches  # while the device is still simulated


def test_replacing_touches_nothing_but_the_places_of_damaged_samples(path: Path, loader_of: MakeLoader) -> None:
    """Behind a short batch the slot holds what it held."""
    change(path, 46)
    loader = loader_of(on_damage="skip", shuffle=False)
    with pytest.warns(RuntimeWarning, match="sample 46"):
        list(loader)
    slot = Slot(np.arange(4 * NBYTES).astype(np.uint8).reshape(4, *SHAPE), np.arange(4), np.array([46, 3, 5, 46]))
    images = slot.images.copy()
    replace = loader._pipeline.last_step(0)
    assert replace is not None
    replace(slot, 3)
    assert slot.indices.tolist()[1:] == [3, 5, 46]
    assert slot.indices[0] in (3, 5)
    assert slot.labels.tolist()[1:] == [1, 2, 3]
    assert np.array_equal(slot.images[1:], images[1:])
    assert np.array_equal(slot.images[0], images[1 if slot.indices[0] == 3 else 2])
