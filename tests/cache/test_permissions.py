"""Caches, roots and copies of several users: who may do what, whatever the umask, and what the others are told."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import run_python, shardio
from disks import raising
from folders import contents
from plain_sets import make_plain_set

from shardio.cache.filler import CopyFiller
from shardio.cache.folder import Cache
from shardio.cache.partial_copy import PartialCopy
from shardio.cache.stage import stage
from shardio.format.layout import MARKER_NAME
from shardio.format.manifest_file import load_manifest
from shardio.sets.storage import FolderStorage

ALICE, BOB = 54321, 54322
GROUP = 54320
A, B = "a" * 64, "b" * 64


@pytest.fixture
def folder() -> Iterator[Path]:
    # pytest's folders are for its user alone, and shared with other runs. All may enter this one.
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def src(folder: Path) -> Path:
    """Ten samples, in two shards. Others may read them."""
    src = make_plain_set(folder, 10, samples_per_shard=5)
    for path in (src, *src.iterdir()):
        path.chmod(0o755)
    return src


def make_cache(folder: Path, mode: int) -> Path:
    cache = folder / "cache"
    cache.mkdir()
    (cache / MARKER_NAME).touch()
    if not os.geteuid():
        os.chown(cache, -1, GROUP)
    cache.chmod(mode)
    return cache


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir() if path.name != MARKER_NAME}


def as_user(user: int, code: str, *words: object, umask: int = 0o022) -> str:
    """Returns what `code` prints and says, run by a user of GROUP. `shardio()` in it is the command line."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    start = f"""
import os, sys
from shardio.cli import main
from shardio import ShardLoader
os.umask({umask})
os.setgroups([{GROUP}])
os.setgid({user})
os.setuid({user})
def shardio(*words):
    sys.argv = ["shardio", *words]
    return main.main()
"""
    result = run_python("-c", start + code, *words)
    return result.stdout + result.stderr


STAGE = "sys.exit(shardio('stage', *sys.argv[1:]))"
EVICT = "sys.exit(shardio('evict', *sys.argv[1:], '--keep', '0'))"
LOAD = """
import warnings
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    with ShardLoader(sys.argv[1], 5, device="cpu", cache=sys.argv[2]) as loader:
        print(sum(len(labels) for _ in range(2) for _, labels in loader))
        print(loader.stats()["staging"]["state"], *(each.message for each in told))
"""


# --- permissions of copies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
@pytest.mark.parametrize(
    ("mode", "folder_mode", "file_mode"),
    [(0o1777, 0o755, 0o644), (0o777, 0o777, 0o666), (0o2775, 0o2775, 0o664), (0o3770, 0o2750, 0o640)],
)
def test_in_a_shared_cache_copies_and_locks_get_the_permissions_of_the_cache(
    src: Path, folder: Path, umask: int, mode: int, folder_mode: int, file_mode: int
) -> None:
    cache = make_cache(folder, mode)
    os.umask(umask)
    copy = Path(stage(src, cache).path)
    assert stat.S_IMODE(copy.stat().st_mode) == folder_mode
    assert modes(copy) == {file_mode}
    assert modes(cache) == {folder_mode, file_mode}
    assert {path.stat().st_gid for path in copy.iterdir()} == {copy.stat().st_gid}
    if file_mode & 0o006 < file_mode >> 3 & 0o006:  # what the group may do, is for the cache's group
        assert copy.stat().st_gid == cache.stat().st_gid


def test_in_a_cache_of_one_user_the_umask_holds_for_copies_and_not_for_their_locks(src: Path, folder: Path) -> None:
    cache = make_cache(folder, 0o755)
    os.umask(0o077)
    report = stage(src, cache)
    assert modes(Path(report.path)) == {0o600}
    assert stat.S_IMODE((cache / f"{report.digest}.lock").stat().st_mode) == 0o644


def test_unfinished_files_of_a_group_are_completed_by_another_member(
    src: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, manifest = make_cache(folder, 0o2775), load_manifest(src)
    os.umask(0o077)
    monkeypatch.setattr(PartialCopy, "finish", raising(InterruptedError))
    with Cache(cache).lease(manifest.digest) as lease, pytest.raises(InterruptedError):
        CopyFiller(FolderStorage(src), manifest, lease).run()
    assert len(list(lease.path.glob(".*"))) == 4  # the states of blocks, an index, two shards
    assert modes(lease.path) == {0o664}
    assert as_user(BOB, STAGE, src, cache) == f"{lease.path}\n"
    assert contents(lease.path) == contents(src)


def test_permissions_of_a_copy_are_mended_when_its_owner_stages_it_again(src: Path, folder: Path) -> None:
    cache = make_cache(folder, 0o1777)
    copy = Path(stage(src, cache).path)
    foreign = folder / "mine"
    foreign.touch(0o600)
    os.link(foreign, copy / "mine")  # as another member of a group could
    for path in copy.iterdir():
        path.chmod(0o600)
    copy.chmod(0o700)
    stage(src, cache)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o755
    assert stat.S_IMODE(foreign.stat().st_mode) == 0o600
    foreign.unlink()
    (copy / "mine").unlink()
    assert modes(copy) == {0o644}


# --- what others may do ----------------------------------------------------------------------------------------------


def as_nobody(cache: Cache, *expressions: str) -> list[str]:
    """Returns the result or error of each expression on `cache`, as text, for a user who owns nothing."""
    code = """
from shardio.cache.folder import Cache
cache = Cache(sys.argv[1])
for expression in sys.argv[2:]:
    try:
        print(eval(expression))
    except OSError as error:
        print(type(error).__name__, os.path.basename(error.filename))
"""
    return as_user(65534, code, cache.folder, *expressions).splitlines()


@pytest.fixture
def cache(folder: Path) -> Cache:
    """A cache with a copy named A, of 1000 bytes. All may enter and read both."""
    cache = Cache(folder / "cache")
    with cache.lease(A) as lease:
        lease.path.mkdir(0o755)
        for name, nbytes in (("train-00000.npy", 1000), ("manifest.json", 0)):
            (lease.path / name).write_bytes(bytes(nbytes))
    return cache


def test_a_user_who_may_only_read_uses_copies_and_removes_none(cache: Cache) -> None:
    held, fill = f"(held := cache.lease('{A}')).is_complete(), cache.copies()[0].in_use", f"PermissionError {A}.fill"
    begin = f"cache.lease('{A}').try_filling('')"
    assert as_nobody(cache, held, f"cache.lease('{B}')", begin) == ["(True, True)", f"PermissionError {B}.lock", fill]
    assert as_nobody(cache, "[copy.nbytes for copy in cache.evict(keep=0).kept]") == ["[1000]"]
    with cache.lease(A) as lease:
        filling = lease.try_filling("")
        assert as_nobody(cache, begin) == ["None"]
        assert filling is not None
        filling.close()
    assert as_nobody(cache, begin) == [fill]
    assert [copy.digest for copy in cache.copies()] == [A]
    # /tmp has such permissions: the kernel lets no user open another user's file there with O_CREAT.
    cache.folder.chmod(0o1777)
    others = f"cache.lease('{B}').try_filling('') is not None"
    assert as_nobody(cache, begin, others, "len(cache.evict(keep=0).kept)") == [fill, "True", "1"]


def test_in_a_groups_cache_a_copy_that_may_be_renamed_but_not_emptied_is_kept_as_it_is(cache: Cache) -> None:
    path = cache.folder / A
    if not os.geteuid():
        os.chown(cache.folder, -1, 65534)
    cache.folder.chmod(0o2775)
    before = set(os.listdir(cache.folder))
    found = as_nobody(
        cache,
        f"cache.may_remove('{A}'), cache.may_remove('{B}')",
        "[copy.in_use for copy in cache.evict(keep=0).kept]",
    )
    assert found == ["(False, True)", "[False]"]
    assert set(os.listdir(cache.folder)) == before
    assert (path / "train-00000.npy").exists()
    os.chown(path, -1, 65534)
    path.chmod(0o2775)
    assert as_nobody(cache, "len(cache.evict(keep=0).removed)") == ["1"]
    assert os.listdir(cache.folder) == [MARKER_NAME]


def test_another_user_removes_neither_a_copy_under_a_sticky_bit_nor_one_that_is_hidden(cache: Cache) -> None:
    path = cache.folder / A
    cache.folder.chmod(0o1777)
    path.chmod(0o777)
    assert as_nobody(cache, f"cache.may_remove('{A}')") == ["False"]
    os.chown(path, 65534, -1)
    assert as_nobody(cache, f"cache.may_remove('{A}')") == ["True"]
    os.chown(path, 0, -1)
    path.chmod(0o700)
    (cache.folder / f"{A}.lock").chmod(0o600)
    expression = "[(copy.in_use, copy.nbytes, copy.complete) for copy in cache.evict(keep=-1).kept]"
    assert as_nobody(cache, expression) == ["[(True, 0, False)]"]
    assert [copy.digest for copy in cache.copies()] == [A]


# --- what others are told --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [".", "manifest.json", "train-00001.npy"])
def test_a_copy_that_cannot_be_read_is_named_with_its_owner_and_the_source_is_read(
    src: Path, folder: Path, hidden: str
) -> None:
    cache = make_cache(folder, 0o1777)
    copy = Path(as_user(ALICE, STAGE, src, cache, umask=0o077).strip())
    (copy / hidden).chmod(0o700)
    said = as_user(BOB, STAGE, src, cache)
    assert said.startswith("shardio: error: ")
    assert len(said.splitlines()) == 1
    count, told = as_user(BOB, LOAD, src, cache).splitlines()
    assert count == "20"
    assert told.startswith("failed: ")
    assert f"training continues, reading {src} without a copy: " in told
    for text in (said, told):
        assert f"{copy} belongs to user {ALICE} (d" in text
        assert "`shardio stage`" in text
    assert as_user(ALICE, STAGE, src, cache) == f"{copy}\n"
    assert as_user(BOB, LOAD, src, cache).splitlines() == ["20", "complete"]


def test_a_copy_of_unknown_size_is_no_copy_of_no_size(src: Path, folder: Path) -> None:
    cache = make_cache(folder, 0o1777)
    copy = Path(as_user(ALICE, STAGE, src, cache).strip())
    kept, rest = as_user(BOB, EVICT, cache).splitlines()
    assert kept.startswith(f"kept the copy of {src}, digest {copy.name[:16]}, ")
    assert kept.endswith(f"kB: only user {ALICE} or root may remove it")
    assert rest.endswith(" kB of copies remain")
    copy.chmod(0o700)
    kept, rest = as_user(BOB, EVICT, cache).splitlines()
    assert kept.endswith(f"digest {copy.name[:16]}, size unknown: only user {ALICE} or root may remove it")
    assert rest == f"{cache}: 0 B of copies remain, and 1 copy of unknown size"
    listed = as_user(BOB, "sys.exit(shardio('list', sys.argv[1], '--cache', sys.argv[2]))", folder, cache)
    assert listed.splitlines()[-1].endswith(f"published  only user {ALICE} may read it")
    result = shardio("evict", cache, "--keep", "0")
    assert result.stdout.startswith(f"removed the copy of {src}, ")


def test_a_folder_that_may_not_be_written_to_is_named_with_its_owner(src: Path, folder: Path) -> None:
    cache = make_cache(folder, 0o755)
    for words in (
        f"'stage', '{src}', '{cache}'",
        f"'stage', '{src}', '{cache / 'below' / 'it'}'",
        f"'publish', '{src}', '{cache / 'name'}'",
    ):
        (line,) = as_user(BOB, f"sys.exit(shardio({words}))").splitlines()
        assert f"{cache} belongs to root (drwxr-xr-x): ask the owner for permission to write, or use another" in line
    cache.chmod(0o777)
    (line,) = as_user(BOB, f"sys.exit(shardio('publish', '{src}', '{cache / 'name'}', '--move'))").splitlines()
    assert f"{src}" in line
    assert "publish a copy (without --move)" in line
