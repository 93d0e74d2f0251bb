"""`pour`: every byte is read, hashed and written once, in pieces of any size; and reads are tried again."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import Path

import pytest
from disks import failing

from shardio.system.pour import RETRY_SECONDS, Attempts, BackgroundSync, pour, synced_writes

DATA = bytes(range(256)) * 5


@pytest.mark.parametrize("piece", [1, 7, 1279, 1280, 1281])
@pytest.mark.parametrize("most", [1, 100, 5000])
def test_all_bytes_are_hashed_and_written_in_order(piece: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.system.pour.PIECE_NBYTES", piece)
    data = DATA[: 100 * piece]

    def read(offset: int, buffer: memoryview) -> int:
        came = data[offset : offset + min(most, len(buffer))]
        buffer[: len(came)] = came
        return len(came)

    written, counts = bytearray(), list[int]()
    assert pour(read, len(data), written.extend, counts.append) == hashlib.sha256(data).hexdigest()
    assert written == data
    assert sum(counts) == len(data)
    assert max(counts) == min(piece, most, len(data))


def test_a_file_that_ends_early_is_hashed_as_far_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.system.pour.HASHED_NBYTES", 100)

    def read(offset: int, buffer: memoryview) -> int:
        came = DATA[offset:250][: len(buffer)]
        buffer[: len(came)] = came
        return len(came)

    assert pour(read, len(DATA)) == hashlib.sha256(DATA[:250]).hexdigest()
    assert pour(lambda offset, buffer: pytest.fail("there is nothing to read"), 0) == hashlib.sha256().hexdigest()


def test_an_error_passes_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.system.pour.PIECE_NBYTES", 100)

    def read(offset: int, buffer: memoryview) -> int:
        if offset:
            raise OSError(errno.EIO, "lost")
        return len(buffer)

    with pytest.raises(OSError, match="lost"):
        pour(read, len(DATA), lambda piece: None)
    assert not [thread for thread in threading.enumerate() if "hash" in thread.name]


def test_one_sync_at_a_time_begins_after_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.system.pour.SYNC_NBYTES", 10)
    may_end, syncs = threading.Event(), list[str]()

    def sync(name: str) -> None:
        syncs.append(name)
        assert may_end.wait(60)

    background = BackgroundSync("sync")
    background.wrote(9, lambda: sync("too few"))
    background.wrote(1, lambda: sync("first"))
    background.wrote(20, lambda: sync("while one is under way"))
    may_end.set()
    background.finish()
    background.wrote(0, lambda: sync("second"))
    background.finish()
    background.wrote(10, lambda: sync("third"))
    background.close()
    assert syncs == ["first", "second", "third"]


def test_an_error_of_an_earlier_piece_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.system.pour.SYNC_NBYTES", 1)
    monkeypatch.setattr(os, "fdatasync", failing(errno.EIO))
    path = tmp_path / "file"
    with (
        path.open("wb") as file,
        pytest.raises(OSError, match=f"Input/output error: '{path}'"),
        synced_writes(path, file.fileno()) as write,
    ):
        write(memoryview(b"piece"))
    assert path.read_bytes() == b"piece"


def test_an_attempt_follows_each_pause_and_then_none(no_pauses: list[float]) -> None:
    attempts = Attempts()
    assert [attempts.again() for _ in range(5)] == [True, True, True, False, False]
    assert attempts.failed == 5
    assert no_pauses == list(RETRY_SECONDS)


def test_an_error_that_does_not_pass_ends_the_attempts_at_once(no_pauses: list[float]) -> None:
    attempts = Attempts()
    assert attempts.again()
    assert not attempts.again(may_pass=False)
    assert (attempts.failed, no_pauses) == (2, [RETRY_SECONDS[0]])
