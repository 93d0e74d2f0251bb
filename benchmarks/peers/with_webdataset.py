"""WebDataset: tars of raw pixels, read in turn and shuffled in a buffer, in worker processes of torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("webdataset", "torch")
SHUFFLED = 1000
PER_TAR = 500


def prepare(samples: np.ndarray, out: Path) -> None:
    import webdataset

    np.save(out / "shape.npy", samples.shape[1:])
    with webdataset.ShardWriter(str(out / "samples-%05d.tar"), maxcount=PER_TAR, verbose=0) as writer:
        for number, sample in enumerate(samples):
            writer.write({"__key__": f"{number:08d}", "pixels": sample.tobytes()})


def decoded(shape: tuple[int, ...], sample: dict[str, Any]) -> tuple[Any, int]:
    # A copy, since torch warns of memory that cannot be written to.
    return np.frombuffer(sample["pixels"], np.uint8).reshape(shape).copy(), int(sample["__key__"])


def loader(out: Path, batch_size: int, workers: int, repeats: int) -> Any:
    import webdataset
    from torch.utils.data import default_collate

    shape = tuple(map(int, np.load(out / "shape.npy")))
    tars = sorted(map(str, out.glob("*.tar")))
    samples = (
        webdataset.WebDataset(tars, shardshuffle=len(tars))
        .repeat(repeats)
        .shuffle(SHUFFLED)
        .map(partial(decoded, shape))
        .batched(batch_size, collation_fn=default_collate)
    )
    batches = webdataset.WebLoader(samples, batch_size=None, num_workers=workers, persistent_workers=True)

    def epoch(number: int) -> Iterator[tuple[Any, Any]]:
        yield from batches

    return epoch


WAYS = {f"WebDataset, shuffled in {SHUFFLED}": loader}
