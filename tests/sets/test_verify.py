"""Damage to a published set is found, and named: by file always, by sample where pixels are concerned."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deadlines import must_not_block
from folders import flip
from pictures import sample_pixels

from shardio.conversion.records import Reject, write_rejects
from shardio.conversion.writing.shard_file import IndexRows, ShardFileWriter
from shardio.errors import FormatError, SetNotFoundError
from shardio.format.entries import SplitEntry
from shardio.format.layout import SampleShape, pixels_row
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import commit_manifest
from shardio.sets.rows import write_index
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
FILES = [name for name, _, _ in SHARDS] + ["train-index.npy", "val-index.npy", "rejects.jsonl"]


def write_set(
    out: Path,
    counts: dict[str, tuple[int, ...]] | None = None,
    shape: SampleShape = SHAPE,
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
            with ShardFileWriter(out / f"{split}-{number:05d}.npy", pixels_row(shape), count) as shard:
                for i in itertools.islice(numbers, count):
                    key = f"{split}/{i}.png".encode()
                    crc32 = shard.append(sample_pixels(i, shape))
                    rows.append(label=label_of(i), key=key, source_size=(9, 9), crc32=crc32)
                entries.append(shard.finish())
        index = write_index(out, split, rows.to_array(20, has_label=True))
        splits[split] = SplitEntry(len(rows), index, tuple(entries))
    rejects = [Reject("train", b"train/bad.JPEG", "damaged", "cut short"), Reject("val", b"\xff", "empty", "0 bytes")]
    manifest = Manifest(shape, classes, splits, write_rejects(out, rejects), {"by": "a test"})
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


HOWS: list[dict[str, Any]] = [{}, {"quick": True}, {"subset": 0.01}]


def only(problems: tuple[Problem, ...], name: str) -> Problem:
    assert [problem.file for problem in problems] == [name]
    return problems[0]


# --- intact sets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("quick", [False, True])
def test_an_intact_set_is_ok_and_all_of_it_was_looked_at(out: Path, quick: bool, workers: int) -> None:
    report = verify(out, quick=quick, workers=workers)
    published = sum((out / name).stat().st_size for name in FILES)
    assert report == VerifyReport(str(out), quick, len(FILES) + 1, published, ())
    assert report.ok
    assert sorted(os.listdir(out)) == sorted([*FILES, "manifest.json"])
    assert verify(str(out)).ok


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
    """Its checksums cannot be trusted; the other split's can."""
    flip(out / "train-index.npy", 4200)
    flip(out / "train-00000.npy", 4100)
    flip(out / "val-00001.npy", 4100)
    problems = {problem.file: problem.samples for problem in found(out)}
    assert problems == {"train-index.npy": (), "train-00000.npy": (), "val-00001.npy": (4,)}


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
    problems = verify(tmp_path / "set").problems
    assert [(problem.file, problem.samples) for problem in problems] == [
        ("train-index.npy", (2, 25)),
        ("val-index.npy", (2,)),
    ]
    for problem in problems:
        assert f"sample 2: expected a label, 0 to 2, found {wrong}" in problem.detail
        assert problem.file in problem.detail
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
    calls: list[tuple[int, int]] = []
    report = verify(out, subset=0.25, seed=3, on_progress=lambda *call: calls.append(call))
    num_samples = 3 + 3 + 2 + 1 + 1
    assert report.ok
    assert report.subset == CheckedShare(0.25, 3, num_samples)
    others = sum((out / name).stat().st_size for name in FILES if not name[-5].isdigit())
    assert report.nbytes == others + num_samples * NBYTES
    assert sum(nbytes for nbytes, _ in calls) == report.nbytes
    assert {total for _, total in calls} == {report.nbytes}
    assert report.num_files == len(FILES) + 1


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
            problems = verify(out, subset=0.3, seed=seed).problems
            if position in chosen:
                problem = only(problems, "train-00001.npy")
                assert problem.samples == (10 + position,)
                expected = "crc32: expected the checksums in the index, found 1 that differ; damaged samples: "
                assert problem.detail.startswith(
                    f"{out / 'train-00001.npy'}: {expected}{10 + position} (train/{10 + position}.png)"
                )
            else:
                assert problems == ()
            flip(out / "train-00001.npy", 4096 + position * NBYTES + 7)


def test_without_a_sound_index_no_sample_of_its_split_is_compared(out: Path) -> None:
    flip(out / "train-index.npy", 5000)
    flip(out / "train-00000.npy", 4096)
    flip(out / "val-00000.npy", 4096)
    report = verify(out, subset=1.0)
    assert [problem.file for problem in report.problems] == ["train-index.npy", "val-00000.npy"]
    assert report.subset is not None
    assert report.subset.num_samples == 7


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
    real = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if Path(path).name == "train-00001.npy":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    for quick in (False, True):
        problem = only(found(out, quick=quick), "train-00001.npy")
        assert problem.detail.endswith("expected a readable file, found: Permission denied")
