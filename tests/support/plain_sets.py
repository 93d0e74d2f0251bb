"""Sets whose samples are known by their numbers, and everything that reads a set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pictures import sample_pixels

from shardio.conversion.writing.set_writer import ShardWriter
from shardio.format.entries import ShardEntry
from shardio.format.manifest_file import load_manifest
from shardio.loading.dataset import ShardDataset
from shardio.loading.loader import ShardLoader
from shardio.sets.storage import Storage, open_storage
from shardio.sets.verify import verify
from shardio.system.pour import direct_alignment


def make_plain_set(
    folder: Path, num_samples: int, shape: tuple[int, int, int] = (6, 5, 3), samples_per_shard: int = 10
) -> Path:
    """Makes a set in a folder of its name, if it is not there. Sample i has sample_pixels(i) and label i % 7."""
    out = folder / f"set-{num_samples}-{'x'.join(map(str, shape))}-{samples_per_shard}"
    if not out.exists():
        nbytes = 4096 + samples_per_shard * int(np.prod(shape))
        with ShardWriter(out, shape, classes=[f"c{i}" for i in range(7)], shard_nbytes=nbytes) as writer:
            for i in range(num_samples):
                writer.append(sample_pixels(i, shape), i % 7, key=f"c{i % 7}/{i}.png")
    return out


def read_in_every_way(path: Path) -> None:
    """Opens a set, reads it by every engine with and without a check, and verifies it."""
    manifest = load_manifest(path)
    ios = ["auto", "mmap", "pread"]
    if direct_alignment(path / manifest.splits["train"].shards[0].file) is not None:
        ios.append("direct")
    for io in ios:
        for check in ("off", "sample"):
            with ShardLoader(path, 4, io=io, device="cpu", digest=manifest.digest, check=check) as loader:  # type: ignore[arg-type]
                assert sum(len(labels) for _, labels in loader) == len(loader) * 4
    assert len(ShardDataset(path).__getitems__([0, 3])) == 2
    for how in ({}, {"quick": True}, {"subset": 0.5}):
        assert verify(path, **how).ok  # type: ignore[arg-type]
    storage = open_storage(path)
    index = storage.load_manifest().splits["train"].index
    storage.read_into(index, 4096, memoryview(bytearray(8)))


def first_shard(out: Path) -> ShardEntry:
    return load_manifest(out).splits["train"].shards[0]


def read_range(place: Storage, entry: ShardEntry, start: int, stop: int) -> bytes:
    buffer = bytearray(stop - start)
    place.read_into(entry, start, memoryview(buffer))
    return bytes(buffer)
