"""ShardDataset, a map-style dataset for code with a torch DataLoader; a ShardLoader's dataset and sampler."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Sampler

from shardio.loading.options import as_names, find_parts
from shardio.loading.state import Position
from shardio.reading.mixed import AnySet
from shardio.reading.shardset import open_shards, position_of
from shardio.system.eager import eager


class ShardDataset(Dataset[tuple[Any, ...]]):
    """A map-style dataset of samples (image, label). If the split has no images or no labels, samples have none.

    The image is a copy, a uint8 tensor (C, H, W), or with `as_pil` a PIL image, as in torchvision's ImageFolder.
    The label is an int, a float or a float32 tensor (K,). `transform` is called with the image, `target_transform` with
    the label. With `arrays`, names of arrays of the split, samples end in a dict of tensors by name, which are copies.
    Raises ValueError if `arrays` has masks and a `transform` is given or set, which would change only the image.

    Works in forked and in spawned DataLoader workers: a pickle holds the path, and each process maps the set again.
    """

    _indices: NDArray[np.int64] | None = None
    """The samples of a LoaderDataset; None for all samples of the split."""
    _masks: tuple[str, ...] = ()

    def __init__(
        self,
        path: str | os.PathLike[str],
        split: str = "train",
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        *,
        as_pil: bool = False,
        arrays: Sequence[str] = (),
    ) -> None:
        self.path = os.fspath(path)
        self.split = split
        self.target_transform = target_transform
        self.as_pil = as_pil
        self.shards: AnySet = open_shards(path, split)
        parts = find_parts(self.shards, as_names(arrays))
        self.arrays = parts.array_names
        self._masks = parts.masks
        self.transform = transform
        channels = parts.image_shape[2] if parts.image_shape else 1
        if as_pil and not 1 <= channels <= 4:  # which Pillow has a mode for
            raise ValueError(f"as_pil=True needs 1 to 4 channels; found samples of {channels} channels: leave it out")

    def __setattr__(self, name: str, value: object) -> None:
        if name == "transform" and value is not None and self._masks:
            raise ValueError(
                f"transform gets only the image, so {', '.join(self._masks)} would not change with it: leave out "
                "transform=, and change whole samples in a dataset that wraps this dataset"
            )
        super().__setattr__(name, value)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.shards.classes

    @property
    def class_to_idx(self) -> dict[str, int]:
        return {name: label for label, name in enumerate(self.classes)}

    @cached_property
    def targets(self) -> list[Any]:
        """The labels of the dataset's samples, in order. Computed at the first access."""
        labels = self.shards.labels
        chosen: list[Any] = (labels if self._indices is None else labels[self._indices]).tolist()
        return chosen

    def __len__(self) -> int:
        return len(self.shards) if self._indices is None else len(self._indices)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.shards}>"

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return self.__getitems__([position_of(index, len(self))])[0]

    @eager
    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, ...]]:
        """Returns several samples, copied at once. DataLoader calls it with the indices of a batch."""
        wanted = np.asarray(indices) if len(indices) else np.empty(0, np.int64)
        parts: list[Iterable[Any]] = []
        if self.shards.has_pixels:
            pixels = np.empty((len(wanted), *self.shards.sample_shape), np.uint8)
            self.shards.gather(wanted, pixels)
            images = _as_pil(pixels) if self.as_pil else torch.from_numpy(pixels).permute(0, 3, 1, 2).unbind()
            # Generators, and not map(): a StopIteration of the function must not end the batch.
            parts.append(images if self.transform is None else (self.transform(image) for image in images))
        if self.shards.label_row is not None:
            found = self.shards.labels_of(wanted)
            labels = found.tolist() if found.ndim == 1 else torch.from_numpy(found).unbind()
            parts.append(labels if self.target_transform is None else (self.target_transform(one) for one in labels))
        if self.arrays:
            columns = [torch.from_numpy(self.shards.values_of(name, wanted)).unbind() for name in self.arrays]
            parts.append(dict(zip(self.arrays, values, strict=True)) for values in zip(*columns, strict=True))
        return list(zip(*parts, strict=True))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "targets"}


class LoaderDataset(ShardDataset):
    """The dataset of a ShardLoader: the samples in `indices`, or the whole split.

    Frameworks read its length, labels and classes. The loader does not build its batches from this dataset, so a
    transform set here would have no effect: setting one raises AttributeError.
    """

    transform = target_transform = None

    def __init__(self, shards: AnySet, indices: NDArray[np.int64] | None, arrays: tuple[str, ...]) -> None:
        self.path = str(shards.path)
        self.split = shards.split
        self.shards = shards
        self.as_pil = False
        self.arrays = () if shards.has_pixels else arrays
        self._indices = indices

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("transform", "target_transform", "transforms"):
            raise AttributeError(
                f"{name}: a ShardLoader does not build batches from its dataset; set the loader's transform instead"
            )
        super().__setattr__(name, value)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, ...]]:
        if self._indices is not None:
            indices = [int(self._indices[position_of(index, len(self))]) for index in indices]
        return super().__getitems__(indices)


class RankSampler(Sampler[int]):
    """Yields the indices of the samples that a ShardLoader reads next: this rank's part of the next epoch, or of the
    rest of an epoch after a resume. len() counts this rank's samples in a whole epoch. `set_epoch`: as the loader's."""

    def __init__(self, position: Position) -> None:
        self._position = position
        self.set_epoch = position.set_epoch

    def __iter__(self) -> Iterator[int]:
        for indices in self._position.rest().batches(self._position.next.epoch):
            yield from indices.tolist()

    def __len__(self) -> int:
        return self._position.sampler.num_read


def _as_pil(pixels: NDArray[np.uint8]) -> Sequence[Any]:
    from PIL import Image  # which training does without otherwise

    return [Image.fromarray(image[..., 0] if image.shape[2] == 1 else image) for image in pixels]
