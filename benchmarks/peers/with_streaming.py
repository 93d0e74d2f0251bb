"""MosaicML Streaming: its MDS shards of raw pixels, local, in worker processes of torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("mosaicml-streaming", "torch")


def prepare(samples: np.ndarray, out: Path) -> None:
    from streaming import MDSWriter

    shape = ",".join(map(str, samples.shape[1:]))
    with MDSWriter(out=str(out), columns={"image": f"ndarray:uint8:{shape}", "label": "int"}) as writer:
        for number, sample in enumerate(samples):
            writer.write({"image": sample, "label": number})


def loader(out: Path, batch_size: int, workers: int, repeats: int) -> Any:
    from streaming import Stream, StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    samples = StreamingDataset(streams=[Stream(local=str(out), repeat=repeats)], shuffle=True, batch_size=batch_size)
    batches = StreamingDataLoader(samples, batch_size=batch_size, num_workers=workers, persistent_workers=True)

    def epoch(number: int) -> Iterator[tuple[Any, Any]]:
        for batch in batches:
            yield batch["image"], batch["label"]

    return epoch


WAYS = {"MosaicML Streaming": loader}
