"""The file through which tasks on any machine are told to stop, and tell how far they are."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
from deadlines import must_not_block

from shardio.conversion.engines.runfile import RunFile, RunSlot
from shardio.errors import FormatError


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.conversion.engines.runfile._LOOK_SECONDS", 0.0)


@pytest.mark.usefixtures("no_waiting")
def test_each_task_counts_in_a_slot_of_its_own(tmp_path: Path) -> None:
    run_file = RunFile(tmp_path, 3)
    assert run_file.read().tolist() == [[0, 0, 0]] * 3
    slots = [RunSlot(run_file.path, number) for number in range(3)]
    for number, slot in enumerate(slots):
        for _ in range(number):
            slot.report(1, 0)
        slot.report(1, 1)
        assert not slot.stopped()
    assert run_file.read().tolist() == [[1, 1, 0], [2, 1, 0], [3, 1, 0]]


@pytest.mark.usefixtures("no_waiting")
def test_removing_the_file_stops_its_own_tasks_for_good_and_no_others(tmp_path: Path) -> None:
    ours, theirs = RunFile(tmp_path, 1), RunFile(tmp_path, 1)
    slot, other = RunSlot(ours.path, 0), RunSlot(theirs.path, 0)
    assert not slot.stopped()
    ours.remove()
    ours.remove()
    assert slot.stopped()
    assert not other.stopped()
    ours.path.write_bytes(bytes(8))
    assert slot.stopped()
    theirs.remove()
    assert other.stopped()
    with pytest.raises(FileNotFoundError):
        theirs.read()


def test_a_task_looks_at_once_and_then_every_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    run_file = RunFile(tmp_path, 1)
    slot = RunSlot(run_file.path, 0)
    slot.report(5, 2)
    assert not slot.stopped()
    assert run_file.read().tolist() == [[5, 2, 0]]
    slot.report(1, 0)
    run_file.remove()
    now += 0.9
    assert not slot.stopped()
    now += 0.2
    assert slot.stopped()


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize(
    ("code", "stops"), [(errno.ESTALE, True), (errno.ENOENT, True), (errno.EIO, False), (errno.ENOSPC, False)]
)
@pytest.mark.parametrize("call", ["open", "pwrite"])
def test_only_a_file_that_is_gone_says_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, stops: bool
) -> None:
    def fail(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    slot = RunSlot(RunFile(tmp_path, 1).path, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        assert slot.stopped() == stops
    assert slot.stopped() == stops


@pytest.mark.usefixtures("no_waiting")
def test_counts_go_into_a_file_and_nothing_else(tmp_path: Path) -> None:
    run_file = RunFile(tmp_path, 1)
    slot = RunSlot(run_file.path, 0)
    (tmp_path / "precious").write_bytes(bytes(8))
    for put in (os.mkfifo, lambda path: path.symlink_to("precious"), lambda path: os.link(tmp_path / "precious", path)):
        run_file.remove()
        put(run_file.path)
        slot.report(1, 0)
        with must_not_block(), pytest.raises(FormatError, match=r"run\..*: expected a regular file, found"):
            slot.stopped()
    assert (tmp_path / "precious").read_bytes() == bytes(8)
    run_file.remove()
    os.mkfifo(run_file.path)
    with must_not_block(), pytest.raises(FormatError, match="found a FIFO"):
        run_file.read()
