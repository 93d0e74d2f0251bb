"""The attributes and methods that code written for torch's DataLoader expects of a ShardLoader.

A ShardLoader has the attributes of a DataLoader that loops and frameworks read, and names a replacement for each
argument of DataLoader that it does not accept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import torch.utils.data
from numpy.typing import NDArray

from shardio.loading.dataset import ShardDataset
from shardio.loading.options import find_parts
from shardio.loading.state import Position
from shardio.reading.mixed import AnySet
from shardio.reading.shardset import position_of

_NO_PROCESSES = "there are no worker processes: leave it out"
_ORDER = "use shuffle=, indices= and weights= to choose samples; each rank reads its own part"

# Arguments of DataLoader and of torch's samplers -> what to do instead.
_INSTEAD = {
    "num_workers": "use num_threads=, the number of threads that copy samples, or leave it out",
    "drop_last": 'use tail="drop" (the default) for True, and tail="short" for False',
    "pin_memory": "on CUDA, batches go through pinned memory anyway: leave it out",
    "pin_memory_device": "use device=",
    "collate_fn": "samples need no collating; use transform= to change a batch",
    "sampler": _ORDER,
    "batch_sampler": _ORDER,
    "persistent_workers": _NO_PROCESSES,
    "prefetch_factor": "use prefetch=, which counts batches",
    "worker_init_fn": _NO_PROCESSES,
    "multiprocessing_context": _NO_PROCESSES,
    "generator": "use seed=",
    "num_replicas": "use world_size=",  # of DistributedSampler
    "num_samples": "use epoch_batches=, which counts batches",  # of WeightedRandomSampler
    "timeout": "a failed read raises an error in any case: leave it out",
    "in_order": "batches come in order: leave it out",
}


def refuse_options(names: Iterable[str]) -> NoReturn:
    """Raises TypeError: ShardLoader has no arguments `names`. For arguments of DataLoader, says what to use instead."""
    found = list(names)
    known = [f"{name}: {_INSTEAD[name]}" for name in found if name in _INSTEAD]
    if known:
        raise TypeError(f"ShardLoader does not have these arguments of torch: {'; '.join(known)}")
    raise TypeError(f"ShardLoader got an unexpected keyword argument {found[0]!r}")


class LoaderDataset(ShardDataset):
    """The dataset of a ShardLoader: the samples in `indices`, or the whole split.

    Frameworks read its length, labels and classes. The loader does not build its batches from this dataset, so a
    transform set here would have no effect: setting one raises AttributeError.
    """

    transform = target_transform = None

    def __init__(self, shards: AnySet, indices: NDArray[np.int64] | None) -> None:
        self.path = str(shards.path)
        self.split = shards.split
        self.shards = shards
        self.as_pil = False
        self.arrays = find_parts(shards).array_names
        self._indices = indices

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("transform", "target_transform", "transforms"):
            raise AttributeError(
                f"{name}: a ShardLoader does not build batches from its dataset; set the loader's transform instead"
            )
        super().__setattr__(name, value)

    @cached_property
    def targets(self) -> list[Any]:
        """The labels of the dataset's samples, in order. Computed at the first access."""
        labels = self.shards.labels
        chosen: list[Any] = (labels if self._indices is None else labels[self._indices]).tolist()
        return chosen

    def __len__(self) -> int:
        return len(self.shards) if self._indices is None else len(self._indices)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, ...]]:
        if self._indices is not None:
            indices = [int(self._indices[position_of(index, len(self))]) for index in indices]
        return super().__getitems__(indices)


class RankSampler(torch.utils.data.Sampler[int]):
    """Yields the samples that a ShardLoader reads next: this rank's part of the next epoch, or of its rest after a
    resume. `set_epoch` is the loader's method. len() is the number of samples of a whole epoch."""

    def __init__(self, position: Position) -> None:
        self._position = position
        self.set_epoch = position.set_epoch

    def __iter__(self) -> Iterator[int]:
        for indices in self._position.rest().batches(self._position.next.epoch):
            yield from indices.tolist()

    def __len__(self) -> int:
        return self._position.sampler.num_read


class LikeDataLoader:
    """The interface of DataLoader, DistributedSampler and StatefulDataLoader that frameworks use.

    A subclass sets `shards` and `_position`.
    """

    shards: AnySet
    _position: Position

    batch_sampler = None
    """Always None. If there were a batch sampler, frameworks would build their own DataLoader over `dataset`."""

    @property
    def batch_size(self) -> int:
        """Samples per batch and rank. With tail="short", the last batch of an epoch may be smaller."""
        return self._position.sampler.batch_size

    @cached_property
    def dataset(self) -> LoaderDataset:
        """The dataset that an epoch draws its samples from. Frameworks expect it of a DataLoader."""
        return LoaderDataset(self.shards, self._position.indices)

    @property
    def sampler(self) -> RankSampler:
        """A sampler of the indices that are read next, with `set_epoch`. Frameworks expect it of a DataLoader."""
        return RankSampler(self._position)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next `iter()` begin this epoch. If it is not called, each `iter()` begins the next epoch.

        Setting the epoch of a state that was just loaded is harmless: `iter()` still resumes where the state was taken.
        """
        self._position.set_epoch(epoch)

    def __len__(self) -> int:
        """Batches per epoch, the same on every rank."""
        return self._position.sampler.num_batches

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(
            "a ShardLoader gives whole batches and has no single samples: do not wrap it in a DataLoader, or wrap a "
            "ShardDataset instead; loader.dataset[i] is a single sample"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the training loop as JSON values. Counts batches received, not batches read ahead.

        `consumed` is the number of samples of the epoch that all ranks together have received. The state is the same
        on every rank, and does not depend on the number of ranks.
        """
        return self._position.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next `iter()` resume where `state` was taken, with exactly the samples not yet consumed.

        The number of ranks, the batch size and the tail may differ. If the state was taken after an epoch's last batch,
        the next `iter()` yields the samples that tail="drop" left out, usually none, and the second `iter()` begins the
        next epoch, as a loop over epochs expects. Raises ValueError if the state belongs to another set, split or
        order.
        """
        self._position.load_state(state)
