"""Warming reads every byte that was asked for, once, and stops where it would be useless."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from folders import drop

import shardio.reading.warm
from shardio.errors import FormatError, SetNotFoundError, SpaceError
from shardio.reading.shardset import open_shards
from shardio.reading.warm import warm
from shardio.system.opening import OpenFile


@pytest.mark.parametrize("piece", [4096, 5000, 1 << 20])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_byte_is_read_into_the_page_cache(
    workers: int, piece: int, make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shardio.reading.warm, "_PIECE_NBYTES", piece)
    path = make_set(40, (64, 64, 1), 12)
    drop(path)
    cold = open_shards(path).resident_share()
    seen: list[int] = []
    totals: set[int] = set()

    def progress(nbytes: int, total: int) -> None:
        seen.append(nbytes)
        totals.add(total)

    report = warm(path, workers=workers, on_progress=progress)
    nbytes = sum(file.stat().st_size for file in path.glob("*.npy"))
    assert sum(seen) == report.nbytes == nbytes
    assert totals == {nbytes}
    assert (report.num_files, report.splits) == (5, ("train",))
    assert (report.resident_before, report.resident_after) == (cold, 1.0)
    assert warm(path).resident_before == 1.0


def test_a_set_larger_than_the_memory_left_is_refused_unless_forced(
    make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_set(40)
    monkeypatch.setattr(shardio.reading.warm, "memory_left", lambda: 1000)
    monkeypatch.setattr(shardio.reading.warm, "open_checked", lambda *_: pytest.fail("it reads"))
    with pytest.raises(SpaceError, match=r"expected at most the 1,000 bytes of memory.*--force") as caught:
        warm(path)
    assert str(path) in str(caught.value)
    monkeypatch.undo()
    monkeypatch.setattr(shardio.reading.warm, "memory_left", lambda: 1000)
    assert warm(path, force=True).resident_after == 1.0
    monkeypatch.setattr(shardio.reading.warm, "memory_left", lambda: None)
    assert warm(path).resident_after == 1.0


def test_where_the_kernel_does_not_tell_the_share_is_unknown(
    make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio.reading.shardset.ShardSet.resident_share", lambda shards, most, name: None)
    report = warm(make_set(40))
    assert (report.resident_before, report.resident_after) == (None, None)


def test_what_is_not_there_or_cut_is_named(make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_set(40)
    with pytest.raises(SetNotFoundError, match="expected a split 'val', found train"):
        warm(path, split="val")
    open_checked = shardio.reading.warm.open_checked

    def cut(*arguments: object) -> OpenFile:
        file = open_checked(*arguments)  # type: ignore[arg-type]
        os.truncate(path / "train-00002.npy", 4100)
        return file

    with monkeypatch.context() as patch:
        patch.setattr(shardio.reading.warm, "open_checked", cut)
        with pytest.raises(FormatError, match=r"train-00002\.npy: expected 4996 bytes"):
            warm(path, workers=1)
    with pytest.raises(FormatError, match=r"train-00002\.npy: expected 4996 bytes"):
        warm(path)
