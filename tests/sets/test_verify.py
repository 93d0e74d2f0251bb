"""Damage to a published set is found, and named: by file always, by sample where pixels are concerned."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import damage_set
import numpy as np
import pytest
from arrays import change_split, some_arrays, write_array
from command import printed_by, shardio
from damage_set import Damage, Site, open_all
from deadlines import must_not_block
from disks import raising
from folders import everything, flip
from hooks import call_before
from manifests import reseal
from pictures import sample_pixels
from places import CHAOS

from shardio.changes.change import change
from shardio.conversion.records import Reject, write_rejects
from shardio.conversion.writing.shard_file import IndexRows, ShardFileWriter
from shardio.errors import FormatError, SetNotFoundError
from shardio.format.entries import SplitEntry
from shardio.format.layout import HEADER_NBYTES, SampleShape, pixels_row
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import commit_manifest, load_manifest
from shardio.sets.rows import write_index, write_order
from shardio.sets.selection import draw_share
from shardio.sets.verify import CheckedShare, Problem, VerifyReport, verify
from shardio.system import opening
from shardio.system.opening import OpenFile

SHAPE: SampleShape = (4, 5, 3)
NBYTES = 60
COUNTS = {"train": (10, 10, 7), "val": (4, 3)}
SHARDS = [
    (f"{split}-{number:05d}.npy", first, count)
    for split, counts in COUNTS.items()
    for number, (first, count) in enumerate(zip(itertools.accumulate((0, *counts)), counts, strict=False))
]
"""(file, its first sample in the split, how many)"""
HOWS: list[dict[str, Any]] = [{}, {"quick": True}, {"subset": 0.01}]
FILES = [name for name, _, _ in SHARDS] + ["train-index.npy", "val-index.npy", "rejects.jsonl"]


def write_set(
    out: Path,
    counts: dict[str, tuple[int, ...]] | None = None,
    classes: tuple[str, ...] = ("a", "b", "c"),
    label_of: Callable[[int], int] = lambda i: i % 3,
) -> Manifest:
    """A set of several splits with a few rejects: sample i of a split has sample_pixels(i) and key SPLIT/i.png."""
    out.mkdir()
    splits = {}
    for split, shard_counts in (counts or COUNTS).items():
        numbers = itertools.count()
        entries, rows = [], IndexRows()
        for number, count in enumerate(shard_counts):
            with ShardFileWriter(out / f"{split}-{number:05d}.npy", pixels_row(SHAPE), count) as shard:
                for i in itertools.islice(numbers, count):
                    key = f"{split}/{i}.png".encode()
                    crc32 = shard.append(sample_pixels(i, SHAPE))
                    rows.append(label=label_of(i), key=key, source_size=(9, 9), crc32=crc32)
                entries.append(shard.finish())
        index = write_index(out, split, rows.to_array(20, has_label=True))
        splits[split] = SplitEntry(len(rows), index, tuple(entries))
    rejects = [Reject("train", b"train/bad.JPEG", "damaged", "cut short"), Reject("val", b"\xff", "empty", "0 bytes")]
    manifest = Manifest(SHAPE, classes, splits, write_rejects(out, rejects), {"by": "a test"})
    commit_manifest(out, manifest)
    return manifest


@pytest.fixture
def out(tmp_path: Path) -> Path:
    write_set(tmp_path / "set")
    return tmp_path / "set"


def found(out: Path, **how: Any) -> tuple[Problem, ...]:
    """The problems that verify reports, each of which must say what was expected and what was found."""
    with must_not_block():
        report = verify(out, **how)
    assert report.ok == (not report.problems)
    for problem in report.problems:
        assert problem.detail.startswith(f"{out / problem.file}: "), problem
        assert "expected" in problem.detail, problem
        assert "found" in problem.detail, problem
    return report.problems


def by_file(problems: tuple[Problem, ...]) -> dict[str, tuple[int, ...]]:
    return {problem.file: problem.samples for problem in problems}


def only(problems: tuple[Problem, ...], name: str) -> Problem:
    assert [problem.file for problem in problems] == [name]
    return problems[0]


# --- intact sets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [*HOWS, {"subset": 1}, {"workers": 8}], ids=str)
def test_an_intact_set_is_ok_and_all_of_it_was_looked_at(
    out: Path, reordered: Path, in_order: Path, how: dict[str, Any]
) -> None:
    for folder in (out, reordered, in_order):
        before, seen = everything(folder), list[tuple[int, int]]()
        report = verify(str(folder), on_progress=lambda *some, seen=seen: seen.append(some), **how)
        assert report.ok, report.problems
        assert (report.num_files, everything(folder)) == (len(before), before)
        if "subset" not in how:
            assert report.nbytes == load_manifest(folder).nbytes
        assert sum(nbytes for nbytes, _ in seen) == (0 if how.get("quick") else report.nbytes)
        assert {total for _, total in seen} <= {report.nbytes}


def test_other_files_in_the_folder_mean_nothing_and_a_folder_without_a_set_is_none(out: Path, tmp_path: Path) -> None:
    (out / "train-00099.npy").write_bytes(b"x")
    (out / "notes").mkdir()
    assert found(out) == ()
    with pytest.raises(SetNotFoundError, match=r"manifest\.json: not found"):
        verify(tmp_path)


# --- damaged pixels --------------------------------------------------------------------------------------------------


def test_every_flipped_bit_of_the_pixels_is_named_by_sample(out: Path) -> None:
    for name, first, count in SHARDS:
        split = name.split("-")[0]
        for position in range(count):
            where = (0, NBYTES - 1, 7 * position % NBYTES)[position % 3]
            flip(out / name, 4096 + position * NBYTES + where, position % 8)
            problem = only(found(out), name)
            assert problem.samples == (first + position,), where
            assert "sha256: expected" in problem.detail
            assert f"damaged samples: {first + position} ({split}/{first + position}.png)" in problem.detail
            flip(out / name, 4096 + position * NBYTES + where, position % 8)


def test_quick_looks_at_labels_and_not_at_pixels(out: Path) -> None:
    flip(out / "train-00000.npy", 4096)
    flip(out / "rejects.jsonl", 0)
    assert found(out, quick=True) == ()
    flip(out / "train-index.npy", 4096)
    only(found(out, quick=True), "train-index.npy")
    assert [problem.file for problem in found(out)] == ["rejects.jsonl", "train-index.npy", "train-00000.npy"]
    assert [problem.file for problem in found(out, subset=0.01)] == ["rejects.jsonl", "train-index.npy"]


def test_a_long_list_of_samples_is_cut_in_the_text_alone(tmp_path: Path) -> None:
    write_set(tmp_path / "set", {"train": (3, 30)})
    path = tmp_path / "set" / "train-00001.npy"
    data = path.read_bytes()
    path.write_bytes(data[:4096] + bytes(b ^ 255 for b in data[4096:]))
    problem = only(found(tmp_path / "set"), "train-00001.npy")
    assert problem.samples == tuple(range(3, 33))
    assert problem.detail.endswith("22 (train/22.png) and 10 more")
    assert "23 (" not in problem.detail


# --- sizes, headers, absence -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "first", "count"), SHARDS[1:3])
def test_a_shard_of_another_size_has_lost_what_is_not_there(out: Path, name: str, first: int, count: int) -> None:
    data = (out / name).read_bytes()
    for size in (0, 1, 4095, 4096, 4097, 4096 + NBYTES, 4096 + 2 * NBYTES - 1, len(data) - 1, len(data) + NBYTES):
        (out / name).write_bytes((data + bytes(NBYTES))[:size])
        for how in HOWS[1:]:
            only(found(out, **how), name)
        problem = only(found(out), name)
        assert f"expected {len(data)} bytes, as the manifest says, found {size}" in problem.detail
        assert problem.samples == tuple(range(first + max(0, size - 4096) // NBYTES, first + count)), size
    assert "every sample agrees with its crc32 in the index" in problem.detail
    flip(out / name, 4096 + NBYTES)
    assert only(found(out), name).samples == (first + 1,)


def test_a_damaged_header_is_found_and_the_samples_are_sound(out: Path) -> None:
    for at in (*range(0, 4096, 500), 4095):
        flip(out / "train-00001.npy", at, at % 8)
        for how in HOWS:
            problem = only(found(out, **how), "train-00001.npy")
            assert "header: expected" in problem.detail
            assert f"at byte {at}" in problem.detail
            assert problem.samples == ()
        flip(out / "train-00001.npy", at, at % 8)


@pytest.mark.parametrize("name", ["train-00001.npy", "val-index.npy", "rejects.jsonl"])
def test_a_missing_file_or_what_is_no_regular_file_is_found_without_blocking(out: Path, name: str) -> None:
    (out / name).rename(out / "elsewhere")
    lost = {shard: tuple(range(first, first + count)) for shard, first, count in SHARDS}.get(name, ())
    assert only(found(out), name).samples == lost
    kinds: dict[str, Callable[[], object]] = {
        "expected a file of the shard set, found nothing": lambda: None,
        "expected a regular file, found a symbolic link": lambda: (out / name).symlink_to("elsewhere"),
        "expected a regular file, found a FIFO": lambda: [(out / name).unlink(), os.mkfifo(out / name)],
        "expected a regular file, found a folder": lambda: [(out / name).unlink(), (out / name).mkdir()],
    }
    for told, make in kinds.items():
        make()
        for how in HOWS:
            assert only(found(out, **how), name).detail.startswith(f"{out / name}: {told}")


# --- index, rejects, manifest ----------------------------------------------------------------------------------------


def test_a_damaged_index_names_no_samples_of_a_damaged_shard(out: Path) -> None:
    """Its checksums cannot be trusted; the other split's can. A subset compares samples of the other split alone."""
    flip(out / "train-index.npy", 4200)
    flip(out / "train-00000.npy", 4100)
    flip(out / "val-00001.npy", 4100)
    assert by_file(found(out)) == {"train-index.npy": (), "train-00000.npy": (), "val-00001.npy": (4,)}
    report = verify(out, subset=1.0, seed=0)
    assert by_file(report.problems) == {"train-index.npy": (), "val-00001.npy": (4,)}
    assert report.subset == CheckedShare(1.0, 0, 7)


def test_a_damaged_manifest_is_the_only_problem(out: Path) -> None:
    flip(out / "train-00000.npy", 4096)
    flip(out / "manifest.json", 30)
    for quick in (False, True):
        report = verify(out, quick=quick)
        assert only(report.problems, "manifest.json").detail.startswith(f"{out / 'manifest.json'}: ")
        assert (report.num_files, report.ok) == (1, False)


def test_a_manifest_of_another_set_is_found_by_its_checksums(tmp_path: Path, out: Path) -> None:
    write_set(tmp_path / "other", label_of=lambda i: (i + 1) % 3)
    (tmp_path / "other" / "manifest.json").replace(out / "manifest.json")
    for quick in (True, False):
        assert [problem.file for problem in found(out, quick=quick)] == ["train-index.npy", "val-index.npy"]


@pytest.mark.parametrize("wrong", [3, -1, 1000, -(1 << 63), (1 << 63) - 1])
def test_labels_that_name_no_class_are_found(tmp_path: Path, wrong: int) -> None:
    write_set(tmp_path / "set", label_of=lambda i: wrong if i in (2, 25) else i % 3)
    problems = found(tmp_path / "set")
    assert by_file(problems) == {"train-index.npy": (2, 25), "val-index.npy": (2,)}
    assert all(f"sample 2: expected a label, 0 to 2, found {wrong}" in problem.detail for problem in problems)
    assert verify(tmp_path / "set", quick=True).ok


def test_without_classes_any_label_is_right(tmp_path: Path) -> None:
    write_set(tmp_path / "set", classes=(), label_of=lambda i: -(1 << 63) + i)
    assert found(tmp_path / "set") == ()


# --- a subset of the samples -----------------------------------------------------------------------------------------


def test_a_subset_has_at_least_its_share_of_every_shard_each_sample_once() -> None:
    for share, num_samples in itertools.product((1e-9, 0.05, 0.3, 0.5, 1), (1, 2, 7, 100, 1001)):
        chosen = [draw_share(num_samples, share, 7, shard).tolist() for shard in range(10)]
        for positions in chosen:
            assert num_samples * share <= len(positions) < num_samples * share + 1
            assert positions == sorted(set(positions))
            assert 0 <= positions[0] <= positions[-1] < num_samples
        if share < 1 < num_samples:
            assert len(set(map(tuple, chosen))) > 1  # not the same positions in every shard


def test_a_subset_reads_its_samples_and_all_that_is_no_shard(out: Path) -> None:
    report = verify(out, subset=0.25, seed=3)
    num_samples = 3 + 3 + 2 + 1 + 1
    assert report.ok
    assert report.subset == CheckedShare(0.25, 3, num_samples)
    others = sum((out / name).stat().st_size for name in FILES if not name[-5].isdigit())
    assert report.nbytes == others + num_samples * NBYTES


def test_a_seed_chooses_the_same_samples_again_and_none_chooses_new_ones(out: Path) -> None:
    for name, _, count in SHARDS:
        for position in range(count):
            flip(out / name, 4096 + position * NBYTES)
    first = verify(out, subset=0.2, seed=11)
    assert first == verify(out, subset=0.2, seed=11)
    assert [len(problem.samples) for problem in first.problems] == [2, 2, 2, 1, 1]
    drawn = [verify(out, subset=0.2) for _ in range(8)]
    seeds = [report.subset.seed for report in drawn if report.subset]
    assert len(set(seeds)) > 1
    assert verify(out, subset=0.2, seed=seeds[0]) == drawn[0]


def test_what_a_subset_reads_of_damage_is_named_by_sample_and_what_it_does_not_is_not(out: Path) -> None:
    for seed in range(5):
        chosen = draw_share(10, 0.3, seed, 1).tolist()
        for position in range(10):
            flip(out / "train-00001.npy", 4096 + position * NBYTES + 7)
            problems = found(out, subset=0.3, seed=seed)
            if position in chosen:
                problem = only(problems, "train-00001.npy")
                assert problem.samples == (10 + position,)
                assert f"found 1 that differ; damaged samples: {10 + position} (train/" in problem.detail
            else:
                assert problems == ()
            flip(out / "train-00001.npy", 4096 + position * NBYTES + 7)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        *(({"subset": share}, "more than 0 and at most 1") for share in (0, -0.1, 1.01, float("nan"))),
        ({"quick": True, "subset": 0.5}, "give only one of them"),
        ({"seed": 1}, "give `subset`"),
    ],
)
def test_what_is_no_check_is_refused(out: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        verify(out, **options)


def test_a_sample_of_a_subset_that_cannot_be_read_is_damaged_and_the_others_are_read(out: Path) -> None:
    reads = itertools.count()
    with failing_reads(lambda name: name == "val-00000.npy" and next(reads) == 0):
        report = verify(out, subset=1.0, workers=1)
    problem = only(report.problems, "val-00000.npy")
    assert problem.samples == (0,)
    assert "expected a readable file, found: Input/output error; damaged samples: 0 (val/0.png)" in problem.detail
    assert report.subset is not None
    assert report.subset.num_samples == sum(count for _, _, count in SHARDS)


# --- a pinned set ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"quick": True}, {"subset": 0.5}])
def test_a_set_that_is_not_the_pinned_one_is_an_error_and_not_damaged(
    tmp_path: Path, out: Path, how: dict[str, Any]
) -> None:
    digest = write_set(tmp_path / "other", label_of=lambda i: (i + 1) % 3).digest
    assert verify(tmp_path / "other", digest=digest[:16], **how).ok
    with pytest.raises(FormatError, match=f"manifest.json: digest: expected {digest}, found "):
        verify(out, digest=digest, **how)


# --- disks that fail -------------------------------------------------------------------------------------------------


def name_of(file: io.FileIO) -> str:
    return Path(os.readlink(f"/proc/self/fd/{file.fileno()}")).name


@contextlib.contextmanager
def failing_reads(fails: Callable[[str], bool]) -> Iterator[None]:
    """Asks `fails`, with the file's name, before each read of a file of a set, with a buffer or without."""

    class Failing(OpenFile):
        def _ask(self) -> None:
            if fails(name_of(self)):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        def readall(self) -> Any:
            self._ask()
            return super().readall()

        def readinto(self, block: Any) -> Any:
            self._ask()
            return super().readinto(block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "OpenFile", Failing)
        yield


def test_an_unreadable_file_is_found_and_named(out: Path) -> None:
    for unreadable in ("manifest.json", *FILES):
        with failing_reads(lambda name, unreadable=unreadable: name == unreadable):
            problem = only(verify(out, workers=1).problems, unreadable)
        assert problem.detail.startswith(f"{out / unreadable}: expected a readable file, found: Input/output error")
        assert len(problem.samples) == {shard: count for shard, _, count in SHARDS}.get(unreadable, 0)


def test_every_single_failing_read_is_a_problem_and_not_a_crash(out: Path) -> None:
    for first in itertools.count(1):
        reads: list[str] = []

        def fails(name: str, first: int = first, reads: list[str] = reads) -> bool:
            reads.append(name)
            return len(reads) == first

        with failing_reads(fails):
            report = verify(out, workers=1)
        if len(reads) < first:
            assert report.ok
            break
        problem = only(report.problems, reads[first - 1])
        assert "Input/output error" in problem.detail, f"read {first} of {reads}"
    assert first > len(FILES) + 1


def test_an_index_that_changes_between_two_looks_is_a_problem_and_not_a_crash(out: Path) -> None:
    looks = 0

    class Looking(OpenFile):
        def __init__(self, descriptor: int) -> None:
            nonlocal looks
            super().__init__(descriptor)
            if name_of(self) == "val-index.npy":
                looks += 1
                if looks == 2:
                    flip(out / "val-index.npy", 4096)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "OpenFile", Looking)
        report = verify(out, workers=1)
    assert looks == 2
    problem = only(report.problems, "val-index.npy")
    assert problem.detail.startswith(f"{out / 'val-index.npy'}: ")
    assert "sha256" in problem.detail


def test_a_file_that_may_not_be_opened_is_a_problem(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any, *_: object, **__: object) -> None:
        if Path(path).name == "train-00001.npy":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    call_before(monkeypatch, os, "open", refuse)
    for quick in (False, True):
        problem = only(found(out, quick=quick), "train-00001.npy")
        assert problem.detail.endswith("expected a readable file, found: Permission denied")


# --- arrays and orders -----------------------------------------------------------------------------------------------

COUNT = 23
ARRAYS = some_arrays(COUNT, 6, 5)
# Rows come twice, and not at all.
ORDER = np.array([5, 22, 5, 0, 19, 1, 1, 7, 20, 21, 3])


@pytest.fixture
def reordered(make_set: Callable[..., Path], tmp_path: Path) -> Path:
    """Eleven samples in 23 stored rows: ten a shard of pixels, and seven a shard of an array."""
    out = shutil.copytree(make_set(COUNT), tmp_path / "in-another-order")
    change_split(out, ARRAYS, ORDER)
    return out


@pytest.fixture
def in_order(make_set: Callable[..., Path], tmp_path: Path) -> Path:
    out = shutil.copytree(make_set(COUNT), tmp_path / "in-order")
    change_split(out, ARRAYS)
    return out


def damage(out: Path, name: str, row: int) -> str:
    """Changes a stored row of the pixels or of an array. Returns the file's name."""
    train = load_manifest(out).splits["train"]
    nbytes = ARRAYS[name][1][0].nbytes if name else 90
    for shard in train.arrays[name].shards if name else train.shards:
        if row < shard.num_samples:
            flip(out / shard.file, HEADER_NBYTES + row * nbytes + nbytes - 1)
            return shard.file
        row -= shard.num_samples
    raise IndexError(row)


@pytest.mark.parametrize("name", ["", *ARRAYS])
def test_a_damaged_row_is_named_by_all_samples_that_use_it(reordered: Path, name: str) -> None:
    for row, samples in ((5, (0, 2)), (22, (1,)), (1, (5, 6)), (3, (10,))):
        file = damage(reordered, name, row)
        problem = only(found(reordered), file)
        assert problem.samples == samples
        keys = ", ".join(f"{i} (c{ORDER[i] % 7}/{ORDER[i]}.png)" for i in samples)
        assert problem.detail.endswith(f"; damaged samples: {keys}")
        assert only(found(reordered, subset=1), file).samples == samples
        damage(reordered, name, row)
        assert verify(reordered).ok


@pytest.mark.parametrize("name", ARRAYS)
def test_without_an_order_a_damaged_row_is_that_of_its_sample(in_order: Path, name: str) -> None:
    for row in (0, 6, 7, 22):
        file = damage(in_order, name, row)
        assert only(found(in_order), file).samples == (row,)
        damage(in_order, name, row)


def test_a_damaged_row_that_no_sample_uses_is_said_to_be_one(reordered: Path) -> None:
    file = damage(reordered, "clip", 9)
    problem = only(found(reordered), file)
    assert problem.samples == ()
    assert problem.detail.endswith("; damaged rows in the file that no sample uses: 2")
    damage(reordered, "clip", 7)
    problem = only(found(reordered), file)
    assert problem.samples == (7,)
    assert problem.detail.endswith("samples: 7 (c0/7.png); damaged rows in the file that no sample uses: 2")
    assert only(found(reordered, subset=1), file).samples == (7,)


def test_pixels_that_no_sample_uses_have_no_crc32_and_that_is_said(reordered: Path) -> None:
    file = damage(reordered, "", 12)
    problem = only(found(reordered), file)
    assert problem.samples == ()
    assert problem.detail.endswith("and 9 stored rows in it are unused and have no crc32")
    # A subset reads samples, and none uses that row.
    assert verify(reordered, subset=1).ok


def test_a_lost_file_loses_the_values_of_its_samples(reordered: Path) -> None:
    (reordered / "train-mask-00002.npy").unlink()
    problem = only(found(reordered), "train-mask-00002.npy")
    assert problem.samples == tuple(np.flatnonzero((ORDER >= 14) & (ORDER < 21)).tolist())
    assert "rows in the file that no sample uses: 0, 1, 2, 3, 4" in problem.detail


@pytest.mark.parametrize("name", ["train-order-0.npy", "train-clip-crc32.npy"])
def test_a_damaged_order_or_file_of_checksums_is_found_and_names_no_samples(reordered: Path, name: str) -> None:
    flip(reordered / name, HEADER_NBYTES + 1)
    problem = only(found(reordered), name)
    assert "sha256: expected" in problem.detail
    assert problem.samples == ()
    assert only(found(reordered, quick=True), name) == problem
    damage(reordered, "clip", 0)
    assert by_file(found(reordered)) == {name: (), "train-clip-00000.npy": ()}
    assert only(found(reordered, subset=1), name).samples == ()
    flip(reordered / name, 100)  # the header
    assert name in [problem.file for problem in verify(reordered, quick=True).problems]


def test_without_an_index_values_are_named_by_number_alone(reordered: Path) -> None:
    flip(reordered / "train-index.npy", HEADER_NBYTES)
    file = damage(reordered, "mask", 22)
    problem = next(problem for problem in verify(reordered).problems if problem.file == file)
    assert problem.samples == (1,)
    assert problem.detail.endswith("; damaged samples: 1")


@pytest.mark.parametrize("wrong", [-1, COUNT, 1 << 62, -(1 << 63)])
def test_a_number_of_no_stored_row_is_found_and_named(reordered: Path, wrong: int) -> None:
    entry = load_manifest(reordered).splits["train"].orders[0]
    order = ORDER.copy()
    order[4] = order[8] = wrong
    data = bytearray((reordered / entry.file).read_bytes())
    data[HEADER_NBYTES:] = order.tobytes()
    reseal(reordered, entry, bytes(data))
    for how in ({}, {"subset": 1.0}):
        problem = only(found(reordered, **how), entry.file)
        assert problem.samples == (4, 8)
        assert f"sample 4: expected a stored row of the pixels, 0 to 22, found {wrong}" in problem.detail
    assert verify(reordered, quick=True).ok
    damage(reordered, "mask", 5)
    assert [problem.samples for problem in verify(reordered).problems] == [(4, 8), (0, 2)]


def test_an_order_must_fit_all_that_have_it(make_set: Callable[..., Path]) -> None:
    out = make_set(COUNT)
    manifest = load_manifest(out)
    train = manifest.splits["train"]
    short = replace(write_array(out, "train", "short", "array", np.arange(4)), order=0)
    order = write_order(out, "train", 0, np.array([3, 2, 4, *[0] * 20]))
    commit_manifest(out, replace(manifest, splits={"train": replace(train, orders=(order,), arrays={"short": short})}))
    problem = only(found(out), "train-order-0.npy")
    assert "sample 2: expected a stored row of the short, 0 to 3, found 4" in problem.detail


def test_files_that_the_manifest_calls_larger_than_memory_are_damaged_ones(
    make_set: Callable[..., Path], tmp_path: Path
) -> None:
    out, count = make_set(COUNT), 1 << 36
    manifest = load_manifest(out)
    train = manifest.splits["train"]
    index = replace(train.index, nbytes=HEADER_NBYTES + count * train.index.dtype.itemsize)
    shard = replace(train.shards[0], num_samples=count, nbytes=train.shards[0].row.file_nbytes(count))
    huge = replace(train, num_samples=count, index=index, shards=(shard,))
    commit_manifest(out, replace(manifest, splits={"train": huge}))
    assert {problem.file for problem in verify(out, subset=0.5).problems} == {index.file, shard.file}
    with pytest.raises(FormatError, match=f"{index.file}: expected {index.nbytes} bytes"):
        change(out, tmp_path / "new", classes="used")


def test_a_nan_is_a_value_and_a_bool_that_is_neither_0_nor_1_is_not(in_order: Path, tmp_path: Path) -> None:
    nan = tmp_path / "nan"
    shutil.copytree(in_order, nan)
    entry = load_manifest(in_order).splits["train"].arrays["flags"].shards[0]
    data = bytearray((in_order / entry.file).read_bytes())
    data[HEADER_NBYTES + 9 * 5 + 3] = 2
    reseal(in_order, entry, bytes(data))
    problem = only(found(in_order), entry.file)
    assert problem.samples == (9,)
    assert "expected only the bytes 0 and 1 in flags, which is |b1" in problem.detail
    assert "9 (c2/9.png)" in problem.detail
    change_split(nan, {"scores": ("array", np.full((COUNT, 3), np.nan, "<f4"))})
    assert found(nan) == ()


def test_a_subset_reads_the_same_samples_whatever_arrays_there_are(make_set: Callable[..., Path]) -> None:
    out = make_set(COUNT)
    before = verify(out, subset=0.3, seed=5).subset
    change_split(out, ARRAYS)
    after = verify(out, subset=0.3, seed=5).subset
    assert before == CheckedShare(0.3, 5, 3 + 3 + 1)
    assert after == CheckedShare(0.3, 5, 3 + 3 + 1, 3 * (3 * 3 + 1) + 2 * 7)  # two arrays are small


def test_the_command_says_how_many_values_were_read(reordered: Path) -> None:
    result = shardio("verify", reordered, "--subset", "100%", "--seed", "1")
    assert result.returncode == 0, result.stderr
    values = len(ARRAYS) * COUNT
    assert f"intact: 9 samples and {values} values of arrays (seed 1), sizes, headers" in result.stdout


# --- random damage, and whether it would be noticed -------------------------------------------------------------------


def test_every_damage_is_found_named_and_refused_and_nothing_is_left_behind(tmp_path: Path) -> None:
    words = ("--damages", "60", "--rounds", "10", "--seed", "5")
    printed = printed_by(CHAOS / "damage_set.py", *words, TMPDIR=str(tmp_path))
    assert printed.splitlines()[-1] == "60 damages, 0 not found or not named, 0 deaths, 0 hangs"
    assert "10 rounds of training, 0 with wrong samples" in printed
    assert os.listdir(tmp_path) == []


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return damage_set._make_site(tmp_path / "site", "rgb")


NAMED = "to be named, found"
CARELESS: dict[str, tuple[dict[str, Any], Callable[[Any], Any], str]] = {
    "sizes alone": ({"quick": True}, lambda found: found, NAMED),
    "some samples": ({"subset": 0.2, "seed": 0}, lambda found: found, NAMED),
    "nothing": ({}, lambda found: [], "found {}"),
    "one file": ({}, lambda found: found[:1], NAMED),
    "no samples": ({}, lambda found: [replace(one, samples=()) for one in found], NAMED),
    "no path": ({}, lambda found: [replace(one, detail="damaged") for one in found], "expected the path in"),
    "too much": ({}, lambda found: [*found, Problem("rejects.jsonl", "x", (1,))], "'rejects.jsonl': (1,)"),
}


@pytest.mark.parametrize("how", CARELESS)
def test_a_careless_verifier_is_noticed(how: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    options, mend, told = CARELESS[how]

    def careless(folder: Path, workers: int) -> VerifyReport:
        report = verify(folder, workers=workers, **options)
        return replace(report, problems=tuple(mend(report.problems)))

    monkeypatch.setattr(damage_set, "verify", careless)
    wrong = [text for number in range(25) if (text := site.try_damage(site.draw(7, number)))]
    assert wrong
    assert all(told in text for text in wrong)


def test_a_careless_opening_is_noticed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = Damage("cut off", {"val-00001.npy": site.sound["val-00001.npy"][:-1]})
    flipped = Damage("one bit flipped", {"val-00001.npy": site.sound["val-00001.npy"][:-1] + b"?"})
    assert site.try_damage(cut) == site.try_damage(flipped) == ""
    monkeypatch.setattr(damage_set, "open_all", lambda folder, split: None)
    assert "expected val to be refused for ['val-00001.npy'], but it was opened" in site.try_damage(cut)
    monkeypatch.setattr(damage_set, "open_all", raising(FormatError("something is damaged")))
    assert "expected train to be refused for nothing, found something is damaged" in site.try_damage(flipped)

    def refuse_another(folder: Path, split: str) -> None:
        if split == "val":
            raise FormatError(f"{folder / 'val-00000.npy'}: is damaged")
        open_all(folder, split)

    monkeypatch.setattr(damage_set, "open_all", refuse_another)
    assert "expected val to be refused for ['val-00001.npy'], found" in site.try_damage(cut)
