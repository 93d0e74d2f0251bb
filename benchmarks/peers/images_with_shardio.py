"""shardio: images are converted once; each epoch reads samples, crops, resizes, flips and normalizes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("shardio",)


def prepare(images: Path, out: Path) -> None:
    write(images, out, workers=2)


def write(images: Path, out: Path, workers: int) -> None:
    from shardio import convert

    # torchvision's filter, for the sake of the comparison.
    convert(images, out / "set", workers=workers, resample="bilinear")


def loader(out: Path, batch_size: int, workers: int, repeats: int, transform: Any, **options: Any) -> Any:
    from shardio import ShardLoader, open_shards

    by_name = np.argsort(open_shards(out / "set").index["key"])
    return ShardLoader(
        out / "set",
        batch_size,
        num_threads=workers,
        indices=np.tile(by_name, repeats),
        tail="short",
        device="cpu",
        rank=0,
        world_size=1,
        transform=transform,
        **options,
    )


def evaluated(out: Path, count: int) -> np.ndarray:
    """Returns the first pictures of an evaluation, float32 (count, 3, 224, 224) from 0 to 1."""
    from shardio.augment import CenterCrop

    with loader(out, count, 1, 1, CenterCrop(224), shuffle=False) as batches:
        images, _ = next(iter(batches))
    return np.array(images, np.float32) / 255


def opened(chain: Callable[[], list[Any]]) -> Callable[[Path, int, int, int], Any]:
    def way(out: Path, batch_size: int, workers: int, repeats: int) -> Any:
        import torch

        from shardio.augment import Compose

        torch.set_num_threads(workers)
        transform = Compose(chain()) if chain() else None
        batches = loader(out, batch_size, workers, repeats, transform)

        def epoch(number: int) -> Iterator[tuple[Any, Any]]:
            batches.set_epoch(number)
            yield from batches

        return epoch

    return way


def cropped() -> list[Any]:
    from shardio.augment import HorizontalFlip, Normalize, RandomResizedCrop

    return [RandomResizedCrop(224), HorizontalFlip(), Normalize("imagenet")]


def centered() -> list[Any]:
    from shardio.augment import CenterCrop, Normalize

    return [CenterCrop(224), Normalize("imagenet")]


WAYS = {
    "ShardLoader: crop, flip, normalize": opened(cropped),
    "ShardLoader: evaluation": opened(centered),
    "ShardLoader: evaluation, not normalized": opened(lambda: centered()[:1]),
    "ShardLoader: samples alone": opened(list),
}
