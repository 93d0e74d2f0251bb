"""verify names damage of arrays, and of pixels that have an order, by the samples that use the damaged rows."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import change_split, some_arrays, write_array
from command import shardio
from folders import flip
from manifests import reseal

from shardio.changes.change import change
from shardio.errors import FormatError
from shardio.format.layout import HEADER_NBYTES
from shardio.format.manifest_file import commit_manifest, load_manifest
from shardio.sets.rows import write_order
from shardio.sets.selection import draw_share
from shardio.sets.verify import Problem, VerifyReport, verify

COUNT, HEIGHT, WIDTH = 23, 6, 5
NBYTES = HEIGHT * WIDTH * 3
ARRAYS = some_arrays(COUNT, HEIGHT, WIDTH)
# Rows come twice, and not at all.
ORDER = np.array([5, 22, 5, 0, 19, 1, 1, 7, 20, 21, 3])


@pytest.fixture
def out(make_set: Callable[..., Path], tmp_path: Path) -> Path:
    """Eleven samples in 23 stored rows: ten a shard of pixels, and seven a shard of an array."""
    out = shutil.copytree(make_set(COUNT), tmp_path / "in-another-order")
    change_split(out, ARRAYS, ORDER)
    return out


@pytest.fixture
def in_order(make_set: Callable[..., Path], tmp_path: Path) -> Path:
    out = shutil.copytree(make_set(COUNT), tmp_path / "in-order")
    change_split(out, ARRAYS)
    return out


def only(report: VerifyReport, name: str) -> Problem:
    assert [problem.file for problem in report.problems] == [name]
    return report.problems[0]


def row_nbytes(name: str) -> int:
    return ARRAYS[name][1][0].nbytes


def damage(out: Path, name: str, row: int) -> str:
    """Changes a stored row of the pixels or of an array. Returns the file's name."""
    train = load_manifest(out).splits["train"]
    nbytes = row_nbytes(name) if name else NBYTES
    for shard in train.arrays[name].shards if name else train.shards:
        if row < shard.num_samples:
            flip(out / shard.file, HEADER_NBYTES + row * nbytes + nbytes - 1)
            return shard.file
        row -= shard.num_samples
    raise IndexError(row)


@pytest.mark.parametrize("how", [{}, {"quick": True}, {"subset": 1}, {"subset": 0.1}], ids=str)
def test_an_intact_set_is_ok_and_all_of_it_was_looked_at(out: Path, in_order: Path, how: dict[str, Any]) -> None:
    for folder in (out, in_order):
        seen: list[tuple[int, int]] = []
        report = verify(folder, on_progress=lambda *some, seen=seen: seen.append(some), **how)
        assert report.ok, report.problems
        assert report.num_files == len(load_manifest(folder).files) + 1
        if how.get("quick"):
            assert not seen
        else:
            assert sum(nbytes for nbytes, _ in seen) == report.nbytes
            assert {total for _, total in seen} == {report.nbytes}


@pytest.mark.parametrize("name", ["", *ARRAYS])
def test_a_damaged_row_is_named_by_all_samples_that_use_it(out: Path, name: str) -> None:
    for row, samples in ((5, (0, 2)), (22, (1,)), (1, (5, 6)), (3, (10,))):
        file = damage(out, name, row)
        problem = only(verify(out), file)
        assert problem.samples == samples
        keys = ", ".join(f"{i} (c{ORDER[i] % 7}/{ORDER[i]}.png)" for i in samples)
        assert problem.detail.endswith(f"; damaged samples: {keys}")
        assert only(verify(out, subset=1), file).samples == samples
        damage(out, name, row)
        assert verify(out).ok


@pytest.mark.parametrize("name", ["", *ARRAYS])
def test_without_an_order_a_damaged_row_is_that_of_its_sample(in_order: Path, name: str) -> None:
    for row in (0, 6, 7, 22):
        file = damage(in_order, name, row)
        assert only(verify(in_order), file).samples == (row,)
        damage(in_order, name, row)


def test_a_damaged_row_that_no_sample_uses_is_said_to_be_one(out: Path) -> None:
    file = damage(out, "clip", 9)
    problem = only(verify(out), file)
    assert problem.samples == ()
    assert problem.detail.endswith("; damaged rows in the file that no sample uses: 2")
    damage(out, "clip", 7)
    problem = only(verify(out), file)
    assert problem.samples == (7,)
    assert problem.detail.endswith("samples: 7 (c0/7.png); damaged rows in the file that no sample uses: 2")
    assert only(verify(out, subset=1), file).samples == (7,)


def test_pixels_that_no_sample_uses_have_no_crc32_and_that_is_said(out: Path) -> None:
    file = damage(out, "", 12)
    problem = only(verify(out), file)
    assert problem.samples == ()
    assert problem.detail.endswith(
        "; every sample agrees with its crc32 in the index, and 9 stored rows in it are unused and have no crc32"
    )
    # A subset reads samples, and none uses that row.
    assert verify(out, subset=1).ok


def test_a_lost_file_loses_the_values_of_its_samples(out: Path) -> None:
    (out / "train-mask-00002.npy").unlink()
    problem = only(verify(out), "train-mask-00002.npy")
    assert problem.samples == tuple(np.flatnonzero((ORDER >= 14) & (ORDER < 21)).tolist())
    assert "rows in the file that no sample uses: 0, 1, 2, 3, 4" in problem.detail


@pytest.mark.parametrize("name", ["train-order-0.npy", "train-clip-crc32.npy"])
def test_a_damaged_order_or_file_of_checksums_is_found_and_names_no_samples(out: Path, name: str) -> None:
    flip(out / name, HEADER_NBYTES + 1)
    problem = only(verify(out), name)
    assert "sha256: expected" in problem.detail
    assert problem.samples == ()
    assert only(verify(out, quick=True), name) == problem
    damage(out, "clip", 0)
    assert {problem.file: problem.samples for problem in verify(out).problems} == {name: (), "train-clip-00000.npy": ()}
    assert only(verify(out, subset=1), name).samples == ()
    flip(out / name, 100)  # the header
    assert name in [problem.file for problem in verify(out, quick=True).problems]


def test_without_an_index_values_are_named_by_number_alone(out: Path) -> None:
    flip(out / "train-index.npy", HEADER_NBYTES)
    file = damage(out, "mask", 22)
    problem = next(problem for problem in verify(out).problems if problem.file == file)
    assert problem.samples == (1,)
    assert problem.detail.endswith("; damaged samples: 1")


@pytest.mark.parametrize("wrong", [-1, COUNT, 1 << 62, -(1 << 63)])
def test_a_number_of_no_stored_row_is_found_and_named(out: Path, wrong: int) -> None:
    entry = load_manifest(out).splits["train"].orders[0]
    order = ORDER.copy()
    order[4] = order[8] = wrong
    data = bytearray((out / entry.file).read_bytes())
    data[HEADER_NBYTES:] = order.tobytes()
    reseal(out, entry, bytes(data))
    for how in ({}, {"subset": 1.0}):
        problem = only(verify(out, **how), entry.file)
        assert problem.samples == (4, 8)
        assert f"sample 4: expected a stored row of the pixels, 0 to 22, found {wrong}" in problem.detail
    assert verify(out, quick=True).ok
    damage(out, "mask", 5)
    assert [problem.samples for problem in verify(out).problems] == [(4, 8), (0, 2)]


def test_an_order_must_fit_all_that_have_it(make_set: Callable[..., Path]) -> None:
    out = make_set(COUNT)
    manifest = load_manifest(out)
    train = manifest.splits["train"]
    short = replace(write_array(out, "train", "short", "array", np.arange(4)), order=0)
    order = write_order(out, "train", 0, np.array([3, 2, 4, *[0] * 20]))
    commit_manifest(out, replace(manifest, splits={"train": replace(train, orders=(order,), arrays={"short": short})}))
    problem = only(verify(out), "train-order-0.npy")
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
    problem = only(verify(in_order), entry.file)
    assert problem.samples == (9,)
    assert "expected only the bytes 0 and 1 in flags, which is |b1" in problem.detail
    assert "9 (c2/9.png)" in problem.detail
    values = np.full((COUNT, 3), np.nan, "<f4")
    manifest = load_manifest(nan)
    train = manifest.splits["train"]
    arrays = {**train.arrays, "scores": write_array(nan, "train", "scores", "array", values)}
    commit_manifest(nan, replace(manifest, splits={"train": replace(train, arrays=arrays)}))
    assert verify(nan).ok


def test_a_subset_reads_the_same_samples_whatever_arrays_there_are(make_set: Callable[..., Path]) -> None:
    out = make_set(COUNT)
    before = verify(out, subset=0.3, seed=5)
    change_split(out, ARRAYS)
    after = verify(out, subset=0.3, seed=5)
    assert before.subset is not None
    assert after.subset is not None
    assert before.subset.num_samples == after.subset.num_samples == 3 + 3 + 1
    assert (before.subset.num_values, after.subset.num_values) == (0, 3 * (3 * 3 + 1) + 2 * 7)  # two arrays are small
    chosen: Sequence[int] = draw_share(10, 0.3, 5).tolist()
    for position in range(10):
        flip(out / "train-00000.npy", HEADER_NBYTES + position * NBYTES)
    assert only(verify(out, subset=0.3, seed=5), "train-00000.npy").samples == tuple(chosen)


def test_the_command_says_how_many_values_were_read(out: Path) -> None:
    result = shardio("verify", out, "--subset", "100%", "--seed", "1")
    assert result.returncode == 0, result.stderr
    values = len(ARRAYS) * COUNT
    assert f"intact: 9 samples and {values} values of arrays (seed 1), sizes, headers" in result.stdout
