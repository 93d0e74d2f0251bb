"""Everything that reads a set."""

from __future__ import annotations

from pathlib import Path

from shardio.format.entries import ShardEntry
from shardio.format.manifest_file import load_manifest
from shardio.loading.dataset import ShardDataset
from shardio.loading.loader import ShardLoader
from shardio.reading.warm import warm
from shardio.sets.storage import open_storage
from shardio.sets.verify import verify
from shardio.system.direct import direct_alignment


def read_in_every_way(path: Path) -> None:
    """Opens a set, reads it by every engine with and without a check, verifies it and warms it."""
    manifest = load_manifest(path)
    ios = ["auto", "mmap", "pread"]
    if direct_alignment(path / manifest.splits["train"].shards[0].file) is not None:
        ios.append("direct")
    for io in ios:
        for options in ({}, {"check": "sample", "on_damage": "skip"}, {"crop": 3, "check": "sample"}):
            with ShardLoader(path, 4, io=io, device="cpu", digest=manifest.digest, **options) as loader:  # type: ignore[arg-type]
                assert sum(len(labels) for _, labels in loader) == len(loader) * 4
                assert loader.damaged == []
    assert len(ShardDataset(path).__getitems__([0, 3])) == 2
    for how in ({}, {"quick": True}, {"subset": 0.5}):
        assert verify(path, **how).ok  # type: ignore[arg-type]
    assert warm(path).num_files > 0
    storage = open_storage(path)
    index = storage.load_manifest().splits["train"].index
    storage.read_into(index, 4096, memoryview(bytearray(8)))


def first_shard(out: Path) -> ShardEntry:
    return load_manifest(out).splits["train"].shards[0]
