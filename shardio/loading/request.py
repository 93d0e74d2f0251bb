"""A batch that was drawn from the order: what is read of its samples, and how it comes into a slot.

With a Cut, the gather threads read only what the transform will see of each picture. Where nothing has to be waited
for, they also compute its first part: they read windows of a few pictures at a time into memory of their own, where the
processor's caches still have them when they are resampled into the slot. Where storage has to be waited for, the slot
gets the windows, and the consumer's thread has torch's threads resample them.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.augment.cut import Cut, Split
from shardio.loading.parts import Parts
from shardio.loading.ring import Slot
from shardio.loading.transform import CUT_ROWS, Cutter
from shardio.reading.reader import Reader
from shardio.system.direct import aligned_empty

# Windows that a thread reads before it resamples them: no more than caches hold, and enough that the calls cost little.
_ROOM_NBYTES = 4 << 20

_thread = threading.local()


class Request:
    """The samples `indices` of a batch, int64 (B,), of which `parts` are read, or the pixels alone. Any number of
    gather threads may use one at the same time.

    With a `cutter`, only what its cut sees is read of the pictures.
    """

    def __init__(
        self,
        indices: NDArray[np.int64],
        parts: Parts | None = None,
        cutter: Cutter | None = None,
    ) -> None:
        self.indices = indices
        self._parts = parts
        self._cutter = cutter
        self._resamples = cutter is not None and cutter.resamples
        self._cut: Cut | None = None
        self._is_laid_out = False
        # Only gather threads take it, which no signal handler interrupts.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def split(self) -> Split | None:
        """The transform of which only what its first part sees is read; None if pictures are read whole."""
        return None if self._cutter is None else self._cutter.split

    @property
    def cut(self) -> Cut | None:
        """The cut that was made of the pictures, once they are gathered."""
        return self._cut

    def _make_cut(self) -> Cut | None:
        """Returns the cut, which the first thread that asks for it computes: it may have to wait for storage, which
        tells the sizes of pictures."""
        if self._cutter is None:
            return None
        with self._lock:
            if self._cut is None:
                self._cut = self._cutter.cut(self.indices)
            return self._cut

    def announce(self, reader: Reader) -> None:
        """Tells the reader what will be read soon."""
        cut = self._make_cut()
        reader.will_read(self.indices, None if cut is None else cut.windows)

    def read(self, reader: Reader, slot: Slot, start: int, stop: int) -> None:
        """Reads some of the samples into their places in the slot, with their labels and indices."""
        some = slice(start, stop)
        part = self.indices[some]
        cut = self._make_cut()
        if cut is None:
            reader.read(part, slot.images[some])
        else:
            self._lay_out(slot, cut)
            read = self._read_cut if self._resamples else self._read_windows
            read(reader, cut, slot.images, start, stop)
            for name in CUT_ROWS.keys() & slot.more.keys():
                slot.more[name][some] = getattr(cut, name[1:])[some]
        if self._parts is not None:
            self._parts.read_more(reader, part, {name: array[some] for name, array in slot.more.items()})
        slot.labels[some] = reader.column_of("label", part)
        slot.indices[some] = part

    def _lay_out(self, slot: Slot, cut: Cut) -> None:
        with self._lock:
            if not self._is_laid_out:
                if self._resamples:
                    slot.lay_out((len(self), *cut.size, cut.num_channels), cut.dtype)
                else:
                    slot.lay_out((int(cut.ends[-1]),))
            self._is_laid_out = True

    def _read_windows(self, reader: Reader, cut: Cut, images: NDArray[Any], start: int, stop: int) -> None:
        place = images[cut.ends[start] : cut.ends[stop]]
        reader.read(self.indices[start:stop], place, cut.windows[start:stop])

    def _read_cut(self, reader: Reader, cut: Cut, images: NDArray[Any], start: int, stop: int) -> None:
        seen = cut.windows
        ends = (seen.num_pixels[start:stop] * cut.num_channels).cumsum()
        while start < stop:
            # At least one picture, however large.
            count = max(int(np.searchsorted(ends, _ROOM_NBYTES)), 1)
            some = slice(start, start + count)
            pixels = _room(int(ends[count - 1]))
            reader.read(self.indices[some], pixels, seen[some])
            cut.resample(pixels, some, images[some])
            ends = ends[count:] - ends[count - 1]
            start += count


def _room(nbytes: int) -> NDArray[np.uint8]:
    """Returns memory of this thread, uint8 (nbytes,), valid until the next call."""
    memory: NDArray[np.uint8] | None = getattr(_thread, "memory", None)
    if memory is None or len(memory) < nbytes:
        memory = _thread.memory = aligned_empty((max(nbytes, _ROOM_NBYTES),))
    return memory[:nbytes]
