"""The choice of a reader from facts, and refusals."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pictures import sample_pixels

import shardio.reading.choose
import shardio.reading.mapping
import shardio.reading.shardset
from shardio.reading.choose import ReaderFacts, SplitSource, choose, look_at, make_reader, read_ahead_batches
from shardio.reading.file_reader import FileReader
from shardio.reading.reader import MappedReader
from shardio.reading.shardset import open_shards

GB = 10**9


# Facts, the engine, whether to drop what was read, and parts of the reason.
CHOICES: list[tuple[ReaderFacts, str, bool, list[str]]] = [
    (ReaderFacts("fuseblk", 76 * GB, 1.0, 100 * GB, 512), "mmap", False, ["is in the page cache"]),
    (ReaderFacts("", 76 * GB, 1.0, 0, None), "mmap", False, ["is in the page cache"]),
    (ReaderFacts("ext4", 75 * GB, None, 100 * GB, 512), "mmap", False, ["75 GB fit", "100 GB of memory"]),
    (ReaderFacts("ext4", 75 * GB, 0.999, 100 * GB, None), "mmap", False, ["fit"]),
    (ReaderFacts("ext4", 0, None, 0, None), "mmap", False, ["fit"]),
    (ReaderFacts("apfs", 7 * GB, None, None, None), "mmap", False, ["7 GB", "unknown"]),
    (ReaderFacts("ext4", 76 * GB, 0.999, 100 * GB, 512), "direct", False, ["76 GB do not fit"]),
    (ReaderFacts("zfs", 76 * GB, 0.5, 100 * GB, None), "pread", True, ["do not fit", "O_DIRECT does not work on zfs"]),
    (ReaderFacts("", 76 * GB, None, 0, None), "pread", True, ["on this filesystem"]),
    *(
        (ReaderFacts(network, 75 * GB, 1.0, 100 * GB, 512), "pread", False, [f"{network} is a network filesystem"])
        for network in ("nfs4", "lustre", "fuse.sshfs")
    ),
    (ReaderFacts("lustre", 2000 * GB, None, 10 * GB, 512), "pread", True, ["network", "2 TB do not fit", "kept"]),
    (ReaderFacts("nfs4", 2000 * GB, None, None, None), "pread", False, ["network"]),
]


@pytest.mark.parametrize(("facts", "engine", "drop_behind", "parts"), CHOICES, ids=repr)
def test_facts_have_their_engine_and_a_reason(
    facts: ReaderFacts, engine: str, drop_behind: bool, parts: list[str]
) -> None:
    choice = choose(facts)
    assert (choice.engine, choice.drop_behind) == (engine, drop_behind)
    for part in parts:
        assert part in choice.reason


def test_the_facts_of_a_set_are_looked_at(make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    shards = open_shards(make_set(40))
    facts = look_at(shards, 30)
    assert facts.nbytes == 30 * 90
    assert facts.filesystem
    assert facts.resident_share == 1.0  # just written
    assert facts.memory_left
    assert facts.direct_alignment in (None, 512, 4096)
    monkeypatch.setattr(shardio.reading.choose, "filesystem_kind", lambda path: "nfs4")
    assert look_at(shards, 30).resident_share is None  # as it would have to be mapped


def test_a_set_that_the_system_does_not_map_is_read_by_pread(
    make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mmap = shardio.reading.mapping._libc.mmap

    def refuse(*arguments: Any) -> int | None:
        if arguments[4] == -1:  # no file
            return int(mmap(*arguments))
        ctypes.set_errno(errno.ENODEV)
        return shardio.reading.mapping._MAP_FAILED

    path = make_set(40)
    monkeypatch.setattr(shardio.reading.mapping, "_libc", SimpleNamespace(mmap=refuse))
    for io, kind in (("auto", "nfs4"), ("auto", "ext4"), ("pread", "ext4")):
        monkeypatch.setattr(shardio.reading.choose, "filesystem_kind", lambda path, kind=kind: kind)
        monkeypatch.setattr(shardio.reading.shardset, "filesystem_kind", lambda path: "nfs4")
        source = SplitSource(path, "train", None)
        reader = source.make_reader(io, 40)  # type: ignore[arg-type]
        assert reader.name == "pread"
        out = np.empty((40, 6, 5, 3), np.uint8)
        reader.copy("", np.arange(40), out)
        assert np.array_equal(out[39], sample_pixels(39))
        assert source.open([]).labels.tolist() == [i % 7 for i in range(40)]
        assert str(path) not in Path("/proc/self/maps").read_text()
        reader.close()
    with pytest.raises(OSError, match=r'io="pread"') as caught:
        SplitSource(path, "train", None).make_reader("mmap", 40)
    assert caught.value.filename == str(path / "train-00000.npy")


@pytest.mark.parametrize("io", ["mmap", "pread", "direct"])
def test_what_is_asked_for_is_obeyed_and_a_server_is_asked_for_more_at_a_time_than_a_disk(
    io: shardio.reading.choose.Io, make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = open_shards(make_set(40))
    if io == "direct" and look_at(shards, 40).direct_alignment is None:
        pytest.skip("O_DIRECT does not work here")
    monkeypatch.setattr(shardio.reading.choose, "choose", lambda facts: pytest.fail("no choice was asked for"))
    for kind, num_threads in (("ext4", 8), ("fuseblk", 8), ("nfs4", 32)):
        monkeypatch.setattr(shardio.reading.choose, "filesystem_kind", lambda path, kind=kind: kind)
        reader, reason = make_reader(shards, io, 40)
        assert reader.num_threads == (1 if io == "mmap" else num_threads)
        assert (reader.name, reason) == (io, f"asked for by io={io!r}")
        assert type(reader) is (MappedReader if io == "mmap" else FileReader)
        reader.close()


def test_direct_where_it_cannot_work_and_another_engine_are_refused(
    make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shardio.reading.choose, "direct_alignment", lambda path: None)
    monkeypatch.setattr(shardio.reading.choose, "filesystem_kind", lambda path: "tmpfs")
    shards = open_shards(make_set(40))
    with pytest.raises(ValueError, match=rf"{shards.path}: O_DIRECT does not work on tmpfs"):
        make_reader(shards, "direct", 40)
    io: Any
    for io in ("", "MMAP", "odirect", None, 3):
        with pytest.raises(ValueError, match="io must be one of auto, mmap, pread, direct"):
            make_reader(shards, io, 40)


@pytest.mark.parametrize(
    ("batch_nbytes", "left", "batches"),
    [(1, None, 8), (50 << 20, None, 5), (257 << 20, None, 0), (32 << 20, 256 << 20, 2), (1 << 20, 0, 0)],
)
def test_read_ahead_is_bounded_by_bytes_batches_and_memory(batch_nbytes: int, left: int | None, batches: int) -> None:
    assert read_ahead_batches(batch_nbytes, left) == batches
