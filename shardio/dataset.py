"""The same samples as a map-style dataset, for code that already has a torch DataLoader."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from shardio.eager import eager
from shardio.shardset import ShardSet, open_shards


class ShardDataset(Dataset[tuple[torch.Tensor, int]]):
    """Samples (image, label): `image` a copy, uint8 (C, H, W), or what `transform` makes of it; `label` an int.

    Works in forked and in spawned DataLoader workers: what is pickled is the path, and each process maps the set anew.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        split: str = "train",
        transform: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.split = split
        self.transform = transform
        self.shards: ShardSet = open_shards(path, split)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.shards.classes

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        position = range(len(self))[operator.index(index)]  # negative indices, and IndexError
        return self.__getitems__([position])[0]

    @eager
    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, int]]:
        """Many samples with one gather; DataLoader calls this with a whole batch of indices."""
        wanted = np.asarray(indices, np.int64)
        images = np.empty((len(wanted), *self.shards.sample_shape), np.uint8)
        self.shards.gather(wanted, images)
        labels = self.shards.labels_of(wanted).tolist()
        tensors = torch.from_numpy(images).permute(0, 3, 1, 2).unbind()
        return [
            (image if self.transform is None else self.transform(image), label)
            for image, label in zip(tensors, labels, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "shards": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.shards = open_shards(self.path, self.split)
