"""shardio's own loader: a set written by its ShardWriter, read by threads of the process itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("shardio",)


def prepare(samples: np.ndarray, out: Path) -> None:
    from shardio.conversion.writing.set_writer import ShardWriter

    with ShardWriter(out / "set", samples.shape[1:], shard_nbytes=1 << 30) as writer:
        for number, sample in enumerate(samples):
            writer.append(sample, number)


def loader(out: Path, batch_size: int, workers: int, repeats: int, device: str = "cpu") -> Any:
    from shardio import ShardLoader, open_shards

    shards = ShardLoader(
        out / "set",
        batch_size,
        num_threads=workers,
        indices=np.tile(np.arange(len(open_shards(out / "set"))), repeats),
        tail="short",
        device=device,
        rank=0,
        world_size=1,
    )

    def epoch(number: int) -> Iterator[tuple[Any, Any]]:
        shards.set_epoch(number)
        for images, labels in shards:
            yield images.permute(0, 2, 3, 1), labels

    return epoch


WAYS = {"ShardLoader": loader}
