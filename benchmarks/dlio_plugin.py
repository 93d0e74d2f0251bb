"""A plug-in for DLIO, the benchmark behind MLPerf Storage: it reads a shard set with a ShardLoader.

dlio.py runs DLIO with it; its `command` has the words that DLIO wants. FOLDER/train is the set, and FOLDER/valid must
be there. DLIO counts the shards as files of so many samples each. If these are more than the set has, as for many
emulated accelerators, samples are read more than once an epoch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import torch
from dlio_benchmark.common.enumerations import DataLoaderType, DatasetType, FormatType, Shuffle
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader

from shardio import ShardLoader, open_shards


class ShardDataLoader(BaseDataLoader):  # type: ignore[misc]
    """Batches of one split, uint8 (B, C, H, W), as DLIO asks for them: once an epoch, for its rank of MPI."""

    def __init__(self, format_type: FormatType, dataset_type: DatasetType, epoch_number: int) -> None:
        super().__init__(format_type, dataset_type, epoch_number, DataLoaderType.PYTORCH)

    def read(self) -> None:
        args = self._args
        path = os.path.join(args.data_folder, str(self.dataset_type))
        split = "train" if self.dataset_type is DatasetType.TRAIN else "val"
        indices = np.arange(self.num_samples) % len(open_shards(path, split))
        self._loader = ShardLoader(
            path,
            self.batch_size,
            split=split,
            indices=indices,
            shuffle=args.sample_shuffle is not Shuffle.OFF,
            seed=args.seed,
            rank=args.my_rank,
            world_size=args.comm_size,
            num_threads=args.read_threads or None,
            prefetch=args.prefetch_size or 2,
        )

    def next(self) -> Iterator[torch.Tensor]:
        super().next()
        for images, _ in self._loader:
            yield images

    def finalize(self) -> None:
        """DLIO calls this after each epoch, and reads on: the loader is closed when it is forgotten."""


class IdleDataLoader(BaseDataLoader):  # type: ignore[misc]
    """One batch, again and again: what DLIO itself costs."""

    def __init__(self, format_type: FormatType, dataset_type: DatasetType, epoch_number: int) -> None:
        super().__init__(format_type, dataset_type, epoch_number, DataLoaderType.PYTORCH)

    def read(self) -> None:
        self._batch = torch.zeros(self.batch_size, 3, 8, 8, dtype=torch.uint8)

    def next(self) -> Iterator[torch.Tensor]:
        super().next()
        for _ in range(self.num_samples // self._args.comm_size // self.batch_size):
            yield self._batch

    finalize = read
