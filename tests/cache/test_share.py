"""Copies in a cache share files of equal checksums: fetched once, stored once, and freed with the last copy."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from arrays import change_split, some_arrays
from disks import failing
from folders import contents, flip, used_nbytes
from hooks import call_before
from plain_sets import make_plain_set

from shardio.cache import filler as filling
from shardio.cache.folder import Cache
from shardio.cache.leases import CopyPaths
from shardio.cache.stage import stage
from shardio.changes.change import change
from shardio.errors import SpaceError
from shardio.format.layout import HEADER_NBYTES, MARKER_NAME
from shardio.format.manifest_file import load_manifest
from shardio.sets.storage import FolderStorage
from shardio.sets.verify import verify
from shardio.system.opening import FolderHandle

COUNT, SHAPE = 40, (40, 50, 3)
NUM_SHARDS, NUM_NEW = 10, 3
"""The shards that both sets have, and the files that only the second has: an index, an array and its checksums."""


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A set of 40 samples, four a shard, and the same with another label and a small array. No test writes there."""
    folder = tmp_path_factory.mktemp("sets")
    first, second = make_plain_set(folder, COUNT, SHAPE, 4), folder / "second"
    change(first, second, labels={"c0/0.png": "c6"}, arrays={"scores": np.arange(COUNT, dtype="<f2")}, copy=True)
    return first, second


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_what_another_copy_has_is_not_fetched_again(
    sets: tuple[Path, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sets
    one = stage(first, cache)
    assert (one.num_linked, one.nbytes_linked) == (0, 0)
    fetched: list[int] = []
    call_before(monkeypatch, FolderStorage, "read_into", lambda _, entry, offset, buffer: fetched.append(len(buffer)))
    two = stage(second, cache)
    shards = load_manifest(second).splits["train"].shards
    assert sum(fetched) == two.nbytes_copied == two.nbytes - sum(shard.nbytes for shard in shards)
    assert two.nbytes_linked == two.nbytes - two.nbytes_copied
    assert (two.num_linked, two.num_files) == (NUM_SHARDS, NUM_SHARDS + NUM_NEW)
    assert contents(Path(two.path)) == contents(second)
    assert verify(two.path).ok
    assert (Path(one.path) / "train-00007.npy").samefile(Path(two.path) / "train-00007.npy")
    # Both copies together take little more room than one.
    sizes = {copy.digest: (copy.nbytes, copy.nbytes_alone) for copy in Cache(cache).copies()}
    assert sum(nbytes for nbytes, _ in sizes.values()) > 1.8 * used_nbytes(cache)
    assert sizes[one.digest][1] < 0.1 * sizes[one.digest][0]
    again = stage(second, cache)
    assert (again.num_copied, again.num_linked) == (0, 0)


@pytest.mark.parametrize("evicted", [0, 1])
def test_eviction_of_one_copy_keeps_the_other_whole_and_the_last_frees_the_room(
    sets: tuple[Path, Path], cache: Path, evicted: int
) -> None:
    copies = [stage(one, cache) for one in sets]
    kept = copies[1 - evicted]
    total = used_nbytes(cache)
    report = Cache(cache).evict(keep=total)  # what both have counts once
    assert (report.removed, report.nbytes) == ((), total)
    with Cache(cache).lease(kept.digest):
        report = Cache(cache).evict(keep=0)
    assert [copy.digest for copy in report.removed] == [copies[evicted].digest]
    assert [copy.digest for copy in report.kept] == [kept.digest]
    assert report.nbytes == used_nbytes(cache) > 0.9 * total
    assert verify(kept.path).ok
    assert Cache(cache).copies()[0].nbytes_alone == report.nbytes
    last = Cache(cache).evict(keep=0)
    assert (last.nbytes, used_nbytes(cache)) == (0, 0)


def test_no_copy_is_evicted_for_room_that_its_going_would_not_make(
    sets: tuple[Path, Path], cache: Path, make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = [stage(one, cache) for one in sets]
    capacity = used_nbytes(cache) + 1000
    monkeypatch.setattr(Cache, "free_nbytes", lambda self: capacity - used_nbytes(self.folder))
    other = make_set(20, SHAPE, 3)
    with Cache(cache).lease(copies[1].digest), pytest.raises(SpaceError) as caught:
        stage(other, cache)
    (alone,) = (copy.nbytes_alone for copy in Cache(cache).copies() if copy.digest == copies[0].digest)
    assert f"{alone:,} in copies that are not in use" in str(caught.value)
    assert {copy.digest for copy in Cache(cache).copies()} == {copy.digest for copy in copies}
    # Both together make room.
    assert set(stage(other, cache).evicted) == {copy.digest for copy in copies}


@pytest.mark.parametrize(("is_there", "reads_all"), [(True, True), (False, True), (False, False)])
def test_a_damaged_shared_file_is_named_removed_from_the_other_copy_too_and_copied(
    sets: tuple[Path, Path], cache: Path, is_there: bool, reads_all: bool
) -> None:
    one = Path(stage(sets[0], cache).path)
    if is_there:
        stage(sets[1], cache)
    flip(one / "train-00003.npy", -1)
    said: list[str] = []
    report = stage(sets[1], cache, verify=reads_all, on_message=said.append)
    assert report.num_copied == (1 if is_there else 1 + NUM_NEW)
    assert report.num_linked == (0 if is_there else NUM_SHARDS - 1)
    assert verify(report.path).ok
    assert [f"{one}/train-00003.npy" in text for text in sorted(said)].count(True) == 1
    assert not verify(one).ok
    assert stage(sets[0], cache).num_linked == 1
    assert verify(one).ok


def test_a_shared_index_with_another_label_is_copied(sets: tuple[Path, Path], tmp_path: Path, cache: Path) -> None:
    other = shutil.copytree(sets[0], tmp_path / "with an array")
    change_split(other, {"clip": some_arrays(COUNT, *SHAPE[:2])["clip"]})
    flip(Path(stage(sets[0], cache).path) / "train-index.npy", HEADER_NBYTES)
    assert verify(stage(other, cache).path).ok


def test_what_is_cut_missing_or_no_regular_file_is_copied(sets: tuple[Path, Path], cache: Path) -> None:
    one = Path(stage(sets[0], cache).path)
    os.truncate(one / "train-00000.npy", 5000)
    flip(one / "train-00001.npy", 30)
    (one / "train-00002.npy").unlink()
    (one / "train-00003.npy").unlink()
    (one / "train-00003.npy").symlink_to(sets[0] / "train-00003.npy")
    report = stage(sets[1], cache)
    assert verify(report.path).ok
    assert report.num_copied == 4 + NUM_NEW


def test_without_hard_links_everything_is_copied(
    sets: tuple[Path, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(sets[0], cache)
    monkeypatch.setattr(os, "link", failing(errno.EXDEV))
    report = stage(sets[1], cache)
    assert (report.num_linked, report.num_copied) == (0, report.num_files)
    assert verify(report.path).ok


def test_another_users_copy_or_file_an_unfinished_one_and_one_that_is_evicted_give_nothing(
    sets: tuple[Path, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stage(sets[0], cache)
    entries = load_manifest(sets[1]).files
    digest = load_manifest(sets[1]).digest

    (cache / digest).mkdir()

    def link() -> int:
        with FolderHandle(cache / digest) as folder:
            return len(filling.link_from_others(folder, entries))

    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert link() == 0
    lock = CopyPaths(cache, one.digest).lock_alone()
    assert lock is not None
    with lock:
        assert link() == 0
    manifest = Path(one.path) / "manifest.json"
    data = manifest.read_bytes()
    manifest.write_bytes((sets[1] / "manifest.json").read_bytes())
    assert link() == 0
    manifest.unlink()
    assert link() == 0
    manifest.write_bytes(data)
    assert os.listdir(cache / digest) == []
    assert link() == NUM_SHARDS


def test_the_copy_that_gives_files_is_kept_meanwhile_and_not_used(
    sets: tuple[Path, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stage(sets[0], cache)
    os.utime(cache / f"{one.digest}.lock", (7, 7))
    kept: list[object] = []
    call_before(monkeypatch, os, "link", lambda *_, **__: kept.append(Cache(cache).evict(keep=0).removed))
    stage(sets[1], cache)
    assert kept == [()] * NUM_SHARDS
    assert (cache / f"{one.digest}.lock").stat().st_mtime == 7


@pytest.mark.parametrize("is_there", [True, False])
def test_too_little_room_leaves_no_begun_copy(
    sets: tuple[Path, Path], cache: Path, closing: ExitStack, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    kept: set[str] = set()
    if is_there:
        closing.enter_context(Cache(cache).lease(digest := stage(sets[0], cache).digest))
        kept = {digest, f"{digest}.lock", f"{digest}.fill"}
    monkeypatch.setattr(Cache, "free_nbytes", lambda self: 0)
    with pytest.raises(SpaceError):
        stage(sets[1], cache)
    assert set(os.listdir(cache)) == {MARKER_NAME, *kept}


def test_a_copy_with_some_of_its_links_gets_the_others(sets: tuple[Path, Path], cache: Path) -> None:
    """As a process leaves it that is killed between links."""
    one, two = Path(stage(sets[0], cache).path), cache / load_manifest(sets[1]).digest
    two.mkdir()
    for number in range(3):
        os.link(one / f"train-{number:05d}.npy", two / f"train-{number:05d}.npy")
    assert stage(sets[1], cache).num_linked == NUM_SHARDS - 3
    assert contents(two) == contents(sets[1])
    assert verify(one).ok
