"""LitData: its chunks of raw pixels, in worker processes of its StreamingDataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("litdata", "torch")


def prepare(samples: np.ndarray, out: Path) -> None:
    import torch
    from litdata.streaming.writer import BinaryWriter

    # `optimize` starts processes around this writer; what is stored is the same.
    writer = BinaryWriter(str(out), chunk_bytes=64 << 20)
    for number, sample in enumerate(samples):
        writer[number] = (torch.from_numpy(np.array(sample)), number)
    writer.done()
    writer.merge(1)


def loader(out: Path, batch_size: int, workers: int, repeats: int) -> Any:
    from litdata import StreamingDataLoader, StreamingDataset

    samples = StreamingDataset(str(out), shuffle=True, drop_last=False, subsample=float(repeats))
    batches = StreamingDataLoader(samples, batch_size=batch_size, num_workers=workers, persistent_workers=True)

    def epoch(number: int) -> Iterator[tuple[Any, Any]]:
        yield from batches

    return epoch


WAYS = {"LitData": loader}
