"""A split of a set that is read while it is copied into a cache: shards from the copy that are there, others from afar.

Shards are mapped as they come. As another process may be the one that copies, only a look at the folder of the copy
tells that they have come.
"""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.format.layout import MANIFEST_NAME
from shardio.format.manifest import FileEntry, Manifest
from shardio.order.windows import Windows
from shardio.reading.shardset import ShardSet, open_shards
from shardio.sets.storage import FolderStorage, Storage
from shardio.system.eager import eager
from shardio.system.files import write_all
from shardio.system.opening import OpenFile, open_nameless
from shardio.system.pour import pour

# Between two looks for shards that have come.
_LOOK_SECONDS = 1.0


class Copy(Protocol):
    """A folder in which files of the set appear, each of them whole."""

    path: Path

    def has(self, entry: FileEntry) -> bool: ...


class StagedSet(ShardSet):
    """The ShardSet that `copy` will be: until a shard is there, its samples are read from `storage`.

    It can be used as any other, by any number of threads; `path` is that of the copy. Reading raises an OSError that
    names what the storage does not give. If the index is not in the copy, opening fetches and checks it.
    """

    def __init__(self, storage: Storage, manifest: Manifest, split: str, copy: Copy) -> None:
        self._storage = storage
        self._copy = copy
        self._looked_at = float("-inf")
        super().__init__(copy.path, manifest, split)

    def _map_shards(self) -> None:
        self._is_away = np.ones(len(self.content.shards), bool)
        self.look()

    def look(self) -> bool:
        """Map the shards that have come since the last look. Returns whether all are there."""
        self._looked_at = time.monotonic()
        for number in np.flatnonzero(self._is_away).tolist():
            if self._copy.has(self.content.shards[number]):
                try:
                    # Another thread may do the same: then one mapping of the file takes the place of an equal one.
                    self._map_shard(number)
                except FormatError:  # it is damaged, or gone since, and will be copied again
                    continue
                self._is_away[number] = False
        return not self._is_away.any()

    @property
    def num_away(self) -> int:
        """The number of shards that were not in the copy at the last look."""
        return int(self._is_away.sum())

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle opens the copy anew, or the source as long as the copy is not whole."""
        if self.look() and os.path.lexists(self.path / MANIFEST_NAME):
            return super().__reduce__()
        if isinstance(self._storage, FolderStorage):
            return partial(open_shards, digest=self.digest), (self._storage.name, self.split)
        raise TypeError(
            f"a set that is being copied from {self._storage.name} cannot be pickled or copied: wait until the copy is "
            "whole, or open it in the process that uses it"
        )

    def _open_index(self) -> OpenFile:
        entry = self.content.index
        if self._copy.has(entry):
            with contextlib.suppress(FormatError):  # it is damaged, and will be copied again
                return super()._open_index()

        def read(offset: int, buffer: memoryview) -> int:
            self._storage.read_into(entry, offset, buffer)
            return len(buffer)

        file = open_nameless()
        try:
            found = pour(read, entry.nbytes, partial(write_all, file.fileno()))
            if found != entry.sha256:
                raise FormatError(
                    f"{self._storage.path_of(entry)}: sha256: expected {entry.sha256}, found {found}; `shardio verify` "
                    "tells what else is damaged"
                )
        except BaseException:
            file.close()
            raise
        return file

    def _away_of(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        away: NDArray[np.bool_] = self._is_away[self.locate(indices)[0]]
        return away

    @property
    def shard_arrays(self) -> tuple[NDArray[np.uint8], ...]:
        """The same as of any ShardSet. Raises FormatError while a shard is not in the copy."""
        if not self.look():
            missing = self.content.shards[int(np.argmax(self._is_away))].file
            raise FormatError(f"{self.path / missing}: expected a shard that was copied, found none yet")
        return super().shard_arrays

    def _image(self, position: int) -> NDArray[np.uint8]:
        if not self._away_of(np.array([position]))[0]:
            return super()._image(position)
        image = np.empty(self.sample_shape, np.uint8)
        self.gather(np.array([position]), image[None])
        image.flags.writeable = False
        return image

    @eager
    def gather(self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows | None = None) -> None:
        """Does what ShardSet.gather does. Each thread reads samples of shards that are away one after the other."""
        indices = self.check_request(indices, out, windows)
        away = self._away_of(indices)
        if away.any() and time.monotonic() - self._looked_at > _LOOK_SECONDS:
            self.look()
            away = self._away_of(indices)
        if not away.any():
            super().gather(indices, out, windows)
            return
        here = np.flatnonzero(~away)
        pixels = np.empty((len(here), *out.shape[1:]), np.uint8)
        super().gather(indices[here], pixels, None if windows is None else windows[here])
        out[here] = pixels
        for row in np.flatnonzero(away).tolist():
            window = None if windows is None else windows[row : row + 1]
            fetch(self, self._storage, int(indices[row]), out[row], window)


def fetch(shards: ShardSet, storage: Storage, index: int, image: NDArray[np.uint8], window: Windows | None) -> None:
    """Reads one sample, or the lines of its window, from the storage. Raises OSError that names the sample."""
    entry, offset = shards.locate_one(index)
    try:
        if window is None:
            storage.read_into(entry, offset, image.data.cast("B"))
            return
        _, width, channels = shards.sample_shape
        lines = np.empty((window.height, width, channels), np.uint8)
        storage.read_into(entry, offset + int(window.tops[0]) * width * channels, lines.data.cast("B"))
    except OSError as error:
        raise OSError(error.errno, f"sample {index}: {error.strerror}", error.filename) from None
    left = int(window.lefts[0])
    np.copyto(image, lines[:, left : left + window.width])
