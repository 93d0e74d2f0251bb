"""Sets whose samples are known by their numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pictures import sample_pixels

from shardio.conversion.writing.set_writer import ShardWriter


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
