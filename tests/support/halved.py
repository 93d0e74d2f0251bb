"""Sets that are stored as yuv420, and the sets of plain pixels with the same pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shardio.conversion.convert import convert
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.reading.shardset import open_shards

SHAPE = (10, 14, 3)


def make_halved_set(folder: Path, num_samples: int, samples_per_shard: int = 10, seed: int = 0) -> Path:
    """Makes a set of yuv420 with random pictures of SHAPE. Sample i has the label i % 7."""
    pictures = np.random.default_rng(seed).integers(0, 256, (num_samples, *SHAPE), np.uint8)
    items = [(picture, i % 7) for i, picture in enumerate(pictures)]
    nbytes = 4096 + samples_per_shard * SHAPE[0] * SHAPE[1] * 3 // 2
    convert(items, folder, size=SHAPE[:2], pixels="yuv420", order="source", shard_size=nbytes)
    return folder


def make_plain_copy(path: Path, out: Path) -> Path:
    """Makes a set of plain pixels of the pictures that readers of the set `path` see, with their labels and keys."""
    shards = open_shards(path)
    with ShardWriter(out, shards.sample_shape, classes=shards.classes) as writer:
        for sample, key in zip(shards, shards.index["key"].tolist(), strict=True):
            writer.append(sample.image, sample.label, key=key)
    return out
