"""What has a name stays after a loss of power: each command syncs files before they get the name of a set, and the name
before it returns, whoever wrote the files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import printed_by
from pictures import sample_pixels, write_jpeg

from shardio.cache.leases import MARKER_NAME
from shardio.cache.stage import stage
from shardio.changes.change import change
from shardio.changes.merge import merge
from shardio.conversion.convert import convert
from shardio.conversion.repair import repair
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.format import manifest_file
from shardio.format.layout import MANIFEST_NAME
from shardio.format.manifest_file import load_manifest
from shardio.sets import new_folder
from shardio.sets.publish import publish
from shardio.sets.selection import Selection
from shardio.sets.verify import verify
from shardio.system.opening import open_regular


class PageCache:
    """Knows which files, and which names in folders, are in memory alone: at first those of the sets in `written`."""

    def __init__(self, patch: pytest.MonkeyPatch, *written: Path) -> None:
        self.dirty = {key(path) for folder in written for path in (folder, *folder.rglob("*"))}
        self.synced: list[str] = []
        self.named: list[str] = []
        """The files and folders that made a folder a set when they got their names."""
        for name in ("write", "pwrite", "ftruncate", "posix_fallocate"):
            self._wrap(patch, os, name, lambda descriptor, *_: self.dirty.add(key(descriptor)))
        for owner, name in ((os, "link"), (os, "rename"), (new_folder, "rename_without_replacing")):
            self._wrap(patch, owner, name, self._named)
        for name in ("mkdir", "open"):
            self._wrap(patch, os, name, self._made)
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, self._sync)

    def _wrap(self, patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., object]) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            result = real(*args, **options)
            if result is not False:  # a filesystem without renameat2
                note(*args, **options)
            return result

        patch.setattr(owner, name, call)

    def _sync(self, descriptor: int) -> None:
        self.dirty.discard(key(descriptor))
        self.synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    def _made(self, path: Any, flags: int = os.O_CREAT, *_: Any, dir_fd: int | None = None) -> None:
        if flags & os.O_CREAT:
            self.dirty.add(key(full(path, dir_fd).parent))

    def _named(
        self, old: Any, new: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None, **_: Any
    ) -> None:
        path = full(new, dst_dir_fd)
        self.dirty |= {key(full(old, src_dir_fd).parent), key(path.parent)}
        if path.is_dir() or path.name == MANIFEST_NAME:
            self.named.append(path.name)
            folder = path if path.is_dir() else path.parent
            assert self.unsynced(folder) - {key(path.parent)} == set()

    def unsynced(self, folder: Path) -> set[tuple[int, int]]:
        """Returns what of a set is in memory alone: files, or the names of files."""
        names = [entry.file for entry in load_manifest(folder).files]
        return self.dirty & {key(folder / name) for name in (*names, MANIFEST_NAME, ".")}


def key(what: Path | int) -> tuple[int, int]:
    status = os.stat(what)
    return status.st_dev, status.st_ino


def full(path: Any, folder: int | None) -> Path:
    return Path(os.path.abspath(path) if folder is None else f"/proc/self/fd/{folder}/{path}")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for number in range(6):
        write_jpeg(tmp_path / "tree" / f"c{number % 2}" / f"{number}.jpg", sample_pixels(number, (9, 9, 3)))
    return tmp_path / "tree"


def convert_parts(tree: Path, out: Path, *parts: int) -> None:
    for part in parts:
        convert(tree, out, size=8, shard_size=4096 + 192, workers=1, part=(part, 3))


def write_set(target: Path) -> None:
    with ShardWriter(target, (6, 5, 3), classes=["a"], shard_nbytes=4096 + 90) as writer:
        for number in range(100, 103):
            writer.append(sample_pixels(number), 0)


GIVE_A_NAME: dict[str, Callable[[Path, Path, Path, Path], object]] = {
    "convert": lambda tree, one, two, new: convert_parts(tree, new, 1, 2, 3),
    "convert the last part": lambda tree, one, two, new: convert_parts(tree, new, 3),
    "ShardWriter": lambda tree, one, two, new: write_set(new),
    "publish": lambda tree, one, two, new: publish(one, new),
    "publish --move": lambda tree, one, two, new: publish(one, new, move=True),
    "change": lambda tree, one, two, new: change(one, new, drop=Selection(indices=[3])),
    "change an array": lambda tree, one, two, new: change(one, new, arrays={"a": np.zeros((25, 2), np.float32)}),
    "change --copy": lambda tree, one, two, new: change(one, new, drop=Selection(indices=[3]), copy=True),
    "merge": lambda tree, one, two, new: merge([one, two], new),
    "merge --copy": lambda tree, one, two, new: merge([one, two], new, copy=True),
    "stage": lambda tree, one, two, new: stage(one, new.parent),
}


@pytest.mark.parametrize(
    ("command", "renameat2"), [*((command, True) for command in GIVE_A_NAME), ("publish --move", False)]
)
def test_all_files_of_a_set_are_durable_before_its_name_and_the_name_before_the_return(
    tmp_path: Path,
    tree: Path,
    make_set: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    renameat2: bool,
) -> None:
    if not renameat2:
        monkeypatch.setattr(new_folder, "_RENAME_NOREPLACE", 1 << 30)
    one, two, root = make_set(25), tmp_path / "two", tmp_path / "root"
    write_set(two)
    root.mkdir()
    target, written = root / (load_manifest(one).digest if command == "stage" else "new"), [one, two]
    if command == "convert the last part":
        convert_parts(tree, target, 1, 2)
        written.append(target)  # say, it was copied to this disk
    with monkeypatch.context() as patch:
        memory = PageCache(patch, *written)
        GIVE_A_NAME[command](tree, one, two, target)
    assert memory.named
    assert memory.unsynced(target) == set()
    assert key(root) not in memory.dirty
    if command == "publish --move":
        assert memory.synced[-2:] == [str(root), str(tmp_path)]


@pytest.mark.parametrize("command", ["convert", "stage", "repair"])
def test_where_nothing_is_to_do_the_names_are_made_durable_all_the_same(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The process that gave them was killed before it did."""
    out = tmp_path / "out"
    convert_parts(tree, out, 1, 2, 3)
    copy = Path(stage(out, tmp_path / "cache").path)
    with monkeypatch.context() as patch:
        memory = PageCache(patch)
        memory.dirty = {key(out), key(copy)}
        if command == "convert":
            convert_parts(tree, out, 3)
        else:
            stage(out, tmp_path / "cache") if command == "stage" else repair(out, tree)
    assert memory.dirty & {key(out), key(copy)} == {key(out if command == "stage" else copy)}


def test_a_file_taken_over_that_cannot_be_synced_is_written_again(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, new, file = tmp_path / "out", tmp_path / "new", tmp_path / "out" / "train-00001.npy"

    def fsync(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(file):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def opened(place: Any) -> Any:
        if place == file:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open_regular(place)

    convert_parts(tree, out, 1, 2)
    for module, name, failing in ((manifest_file, "open_regular", opened), (os, "fsync", fsync)):
        assert file.exists()
        with monkeypatch.context() as patch:
            patch.setattr(module, name, failing)
            with pytest.raises(OSError, match=file.name):
                convert_parts(tree, out, 3)
    assert not file.exists()
    convert_parts(tree, out, 1, 2, 3)
    monkeypatch.setattr(os, "fsync", fsync)
    assert not publish(out, new, move=True).renamed
    assert not out.exists()
    assert verify(new).ok


def test_the_note_of_a_cache_is_durable(
    make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        memory = PageCache(patch)
        stage(make_set(5), tmp_path / "cache")
    assert key(tmp_path / "cache" / MARKER_NAME) not in memory.dirty


@pytest.mark.parametrize("careless", ["", "manifest_file.fsync_file = publish.fsync_file = lambda path: None"])
def test_after_a_loss_of_power_sets_with_names_are_whole_and_carelessness_is_noticed(
    careless: str, tmp_path: Path
) -> None:
    script = f"""
import lose_power
from shardio.format import manifest_file
from shardio.sets import publish
{careless}
print(lose_power.lose_power(5, 4))
"""
    printed = printed_by("-c", script, TMPDIR=str(tmp_path))
    if "skipped" in printed:
        pytest.skip(printed)
    assert ("torn" in printed, " 0 violations" in printed) == (bool(careless), not careless), printed
