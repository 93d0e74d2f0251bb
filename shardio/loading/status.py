"""The status of a loader, which it publishes to other processes of the node on a page of memory.

The page is a memfd: it takes no disk space, needs no folder, and disappears with its process, however the process ends.
Linux shows it among the descriptors of the process, to the user of the process and to root; see `find_loaders`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

from shardio.format.layout import crc32
from shardio.loading.meter import Counts, Snapshot
from shardio.loading.report import LoaderFacts
from shardio.system.opening import OpenFile, open_file, open_memory

_NAME = "shardio-loader"
_NBYTES = 4096
_HEAD = 9
# Records are written at most so often, and a reader may find them so old.
TELL_SECONDS = 0.5
# Longer paths are told by their ends.
_PATH_LENGTH = 500

Value = TypeVar("Value")


@dataclass(frozen=True)
class LoaderStatus:
    """The published status of a loader: what does not change, and a snapshot of its counts."""

    job: str
    """The job number of the batch system; "" without a batch system."""
    source: LoaderFacts
    snapshot: Snapshot
    moment: float
    """When the loader published this status, in seconds of time.monotonic()."""

    @property
    def waiting_seconds(self) -> float:
        """Seconds that the consumer has waited for its batch until now; 0.0 if it was not waiting at `moment`."""
        waited = self.snapshot.waiting_seconds
        return waited + time.monotonic() - self.moment if waited else 0.0


@dataclass(frozen=True)
class FoundLoader:
    """A loader on this node: the number of its process, the inode of its status page, and the status on it."""

    pid: int
    inode: int
    told: LoaderStatus


class Status:
    """Publishes the status of one loader. Does nothing where the system has no memfd. To be used by one thread."""

    def __init__(self, source: LoaderFacts) -> None:
        self._what = {"job": _job(), "source": asdict(replace(source, path=source.path[-_PATH_LENGTH:]))}
        self._page: OpenFile | None = None
        self._due = 0.0
        with contextlib.suppress(OSError, AttributeError):  # no descriptors are left, or it is not Linux
            self._page = open_memory(_NAME)

    def tell(self, snapshot: Callable[[], Snapshot], now: float) -> None:
        """Writes the status if it is due at `now` (time.perf_counter()): every TELL_SECONDS. Never raises."""
        if now >= self._due:
            self._due = now + TELL_SECONDS
            self.write(snapshot())

    def write(self, snapshot: Snapshot) -> None:
        """Writes the status with this snapshot. Never raises."""
        page = self._page
        if page is None:
            return
        told = {**self._what, "snapshot": asdict(snapshot), "moment": time.monotonic()}
        data = json.dumps(told).encode()
        record = b"%08x " % crc32(data) + data
        with contextlib.suppress(OSError, ValueError):  # memory is short, or the page was closed
            if len(record) <= _NBYTES:
                os.pwrite(page.fileno(), record.ljust(_NBYTES), 0)

    def close(self) -> None:
        if self._page is not None:
            self._page.close()


def _job() -> str:
    names = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
    return next((os.environ[name][:40] for name in names if os.environ.get(name)), "")


def find_loaders() -> list[FoundLoader]:
    """Returns the loaders of all processes that this user may inspect, in the order of process numbers.

    A loader is left out if its status page is being written at the moment, or is not valid.
    """
    found: dict[int, FoundLoader] = {}
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        for seen in _loaders_of(pid):
            found.setdefault(seen.inode, seen)  # a fork has the page of its parent, whose number is mostly the lower
    return list(found.values())


def _loaders_of(pid: int) -> Iterator[FoundLoader]:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:  # another user's, or it has ended
        return
    for name in names:
        with contextlib.suppress(OSError):
            if not os.readlink(f"{folder}/{name}").startswith(f"/memfd:{_NAME} "):
                continue
            with open_file(f"{folder}/{name}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) as page:
                inode = os.fstat(page.fileno()).st_ino
                for _ in range(3):  # it may be read in the middle of being written
                    if (told := parse(os.pread(page.fileno(), _NBYTES, 0))) is not None:
                        yield FoundLoader(pid, inode, told)
                        break


def parse(record: bytes) -> LoaderStatus | None:
    """Returns the status from `record`, the bytes of a status page. None if the checksum or a value is wrong."""
    try:
        data = record[_HEAD:].rstrip()
        if int(record[:_HEAD], 16) != crc32(data):
            return None
        return _value(LoaderStatus, json.loads(data))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _value(kind: type[Value], found: Mapping[str, Any]) -> Value:
    """Returns the dataclass whose fields have these values. Raises ValueError, TypeError or KeyError if it cannot."""
    return kind(**{field.name: _CHECKED[str(field.type)](found[field.name]) for field in fields(kind)})  # type: ignore[arg-type]


Number = TypeVar("Number", int, float)


def _number(value: object, kind: type[Number]) -> Number:
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or not 0 <= value < 1 << 62:
        raise ValueError  # also of NaN and infinity
    return kind(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


# How the values of fields are checked, by the types of the fields.
_CHECKED: dict[str, Callable[[Any], Any]] = {
    "int": partial(_number, kind=int),
    "float": partial(_number, kind=float),
    "str": _text,
    "Counts": partial(_value, Counts),
    "LoaderFacts": partial(_value, LoaderFacts),
    "Snapshot": partial(_value, Snapshot),
}
