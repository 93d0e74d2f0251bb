"""torch's DataLoader over a mapped file, with pinned batches that are copied to the GPU on a stream of their own.

A batch is copied while the one before is used: as the prefetchers do that apex's and timm's training scripts have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from with_dataloader import PACKAGES, Mapped, opened, prepare

__all__ = ["PACKAGES", "WAYS", "prepare"]


def one_ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """Yields the batches on the GPU. The copy of each begins before the one before it is handed out."""
    stream = torch.cuda.Stream()
    coming: list[torch.Tensor] = []
    for batch in batches:
        ready, coming = coming, []
        if ready:
            hand_over(ready, stream)
        with torch.cuda.stream(stream):
            coming = [tensor.cuda(non_blocking=True) for tensor in batch]
        if ready:
            yield ready
    if coming:
        hand_over(coming, stream)
        yield coming


def hand_over(batch: Iterable[torch.Tensor], stream: torch.cuda.Stream) -> None:
    """Lets the current stream wait for the copies, and their memory live as long as it uses it."""
    now = torch.cuda.current_stream()
    now.wait_stream(stream)
    for tensor in batch:
        tensor.record_stream(now)


def prefetched(by_batch: bool) -> Callable[[Path, int, int, int], Any]:
    if not torch.cuda.is_available():
        raise RuntimeError("it needs CUDA")

    def way(out: Path, batch_size: int, workers: int, repeats: int) -> Any:
        pinned = opened(Mapped, by_batch, pinned=True)(out, batch_size, workers, repeats)
        return lambda number: one_ahead(pinned(number))

    return way


WAYS = {
    "DataLoader, numpy.memmap, prefetcher": prefetched(by_batch=False),
    "DataLoader, numpy.memmap by batch, prefetcher": prefetched(by_batch=True),
}
