"""Storages give any range of a published set's files whole, or an error that names the range."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plain_sets import first_shard, read_range

from shardio.errors import FormatError, SetNotFoundError
from shardio.format.manifest_file import load_manifest
from shardio.sets.storage import FolderStorage, open_storage


@pytest.fixture
def out(make_set: Callable[..., Path]) -> Path:
    return make_set(25)


def failing_reads(monkeypatch: pytest.MonkeyPatch, *outcomes: int) -> list[float]:
    """Makes the next reads fail with these errors, or give nothing for a 0. Returns the pauses between the attempts."""
    real, left, waits = os.preadv, list(outcomes), list[float]()

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        if left:
            if code := left.pop(0):
                raise OSError(code, os.strerror(code))
            return 0
        return real(descriptor, [buffers[0][:7]], offset)  # a network may give short answers

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


def test_any_range_of_a_file_is_read_whole(out: Path) -> None:
    entry, place = first_shard(out), open_storage(out)
    data = (out / entry.file).read_bytes()
    for start, stop in ((0, len(data)), (1, 2), (4090, 4200), (len(data) - 1, len(data)), (5, 5)):
        assert read_range(place, entry, start, stop) == data[start:stop]


def test_a_relative_folder_stays_the_same_when_the_process_goes_elsewhere(
    out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(out.parent)
    place = open_storage(out.name)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert place.load_manifest() == load_manifest(out)
    assert place.name == out.name


def test_a_storage_reads_the_set_whose_manifest_it_gave(
    out: Path, make_set: Callable[..., Path], tmp_path: Path
) -> None:
    link, entry = tmp_path / "current", first_shard(out)
    link.symlink_to(out)
    place = open_storage(link)
    assert place.load_manifest() == load_manifest(out)
    link.unlink()
    link.symlink_to(make_set(25, (6, 5, 3), 9))
    assert read_range(place, entry, 0, entry.nbytes) == (out / entry.file).read_bytes()


def test_what_may_pass_is_tried_again(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = first_shard(out)
    waits = failing_reads(monkeypatch, errno.EIO, 0, errno.ESTALE)
    assert read_range(FolderStorage(out), entry, 4096, 4146) == (out / entry.file).read_bytes()[4096:4146]
    assert waits == sorted(waits)
    assert len(waits) == 3


@pytest.mark.parametrize(("code", "attempts"), [(errno.EIO, 4), (errno.EACCES, 1)])
def test_what_does_not_pass_names_file_and_offset(
    out: Path, monkeypatch: pytest.MonkeyPatch, code: int, attempts: int
) -> None:
    entry = first_shard(out)
    failing_reads(monkeypatch, *[code] * 9)
    with pytest.raises(OSError, match=rf"reading 50 bytes at byte 4096 failed \(attempts: {attempts}\)") as caught:
        FolderStorage(out).read_into(entry, 4096, memoryview(bytearray(50)))
    assert caught.value.errno == code
    assert caught.value.filename == str(out / entry.file)


def test_a_file_that_was_cut_or_is_missing_is_refused_at_once(out: Path) -> None:
    entry, place = first_shard(out), FolderStorage(out)
    os.truncate(out / entry.file, entry.nbytes - 1)
    with pytest.raises(FormatError, match=f"expected {entry.nbytes} bytes, .* found {entry.nbytes - 1}"):
        place.read_into(entry, 4096, memoryview(bytearray(5)))
    (out / entry.file).unlink()
    with pytest.raises(FormatError, match="found nothing"):
        place.read_into(entry, 4096, memoryview(bytearray(5)))
    with pytest.raises(SetNotFoundError, match="holds no shard set"):
        open_storage(out.parent).load_manifest()
