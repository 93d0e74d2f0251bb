"""What ties shard tasks on any machine to the one that started them: a file in OUT, which all of them see anyway.

As long as the file is there the tasks go on, and each writes its counts of sources into a slot of its own. To remove
the file is to say stop. It is opened anew at every look, since that is when a network filesystem asks its server
whether the file is still there; in a folder's listing, what others have done may appear half a minute later.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardio.system.opening import open_untrusted, read_untrusted

_COUNT = np.dtype("<u4")
_SLOT_NBYTES = 3 * _COUNT.itemsize  # sources done, of these refused, of these kept
# A thousand tasks must not keep the file server busy with this.
_LOOK_SECONDS = 1.0


class RunFile:
    """The end of the one who started the tasks. Not thread safe."""

    def __init__(self, folder: Path, num_tasks: int) -> None:
        """Make a new one in `folder`. Its name is unique, so that no other run is stopped in this one's place."""
        self.path = folder / f"run.{secrets.token_hex(8)}"
        self.path.write_bytes(bytes(num_tasks * _SLOT_NBYTES))

    def read(self) -> NDArray[np.int64]:
        """(sources done, of these refused, of these kept) of each task: a new array of shape (num_tasks, 3).

        FileNotFoundError if somebody removed the file.
        """
        return np.frombuffer(read_untrusted(self.path), _COUNT).astype(np.int64).reshape(-1, 3)

    def remove(self) -> None:
        """Tell the tasks to stop. May be called again."""
        self.path.unlink(missing_ok=True)


class RunSlot:
    """The end of a task, in any process. Not thread safe."""

    def __init__(self, path: Path, number: int) -> None:
        self._path = path
        self._offset = number * _SLOT_NBYTES
        self._counts = np.zeros(3, _COUNT)
        self._stopped = False
        self._next_look = 0.0

    def report(self, done: int, refused: int, kept: int = 0, /) -> None:
        """Count so many more sources. They are written at the next look, which is now for those that were kept."""
        self._counts += np.array((done, refused, kept), _COUNT)
        if kept:
            self._look()

    def stopped(self) -> bool:
        """Whether the file is gone, for a second at most; True for good then."""
        now = time.monotonic()
        if now >= self._next_look and not self._stopped:
            self._next_look = now + _LOOK_SECONDS
            self._look()
        return self._stopped

    def _look(self) -> None:
        try:
            with open_untrusted(self._path, os.O_WRONLY, sole_name=True) as file:
                os.pwrite(file.fileno(), self._counts.tobytes(), self._offset)
        except OSError as error:
            # Anything else, such as a full disk, is for the shard itself to meet: counts are not worth a failure.
            self._stopped = error.errno in (errno.ENOENT, errno.ESTALE)
