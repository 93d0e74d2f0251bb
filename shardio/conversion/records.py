"""The record of a shard task: written when its files are published, and read by every later run of the conversion.

A task with a record is skipped unless its sources have changed. An unfinished task has no record, only a list of the
sources that it has refused so far.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.plan import Plan, ShardTask
from shardio.conversion.sources.collection import digest
from shardio.errors import FormatError
from shardio.format.entries import FileEntry, RejectsEntry, ShardEntry
from shardio.format.layout import CRC32_ROW, REJECTS_NAME, WORK_FOLDER, index_dtype
from shardio.sets.index import read_checked
from shardio.sets.storage import FolderStorage
from shardio.system.files import write_all, write_atomic
from shardio.system.opening import naming, open_untrusted, read_untrusted

# On a network filesystem, checking whether the sources of finished shards have changed is mostly waiting.
_STAT_THREADS = 16


@dataclass(frozen=True)
class Reject:
    """A source that was refused: a line of rejects.jsonl."""

    split: str
    key: bytes
    reason: str
    detail: str

    def to_line(self) -> bytes:
        """Returns the line of rejects.jsonl: ASCII JSON, with the key decoded as by `os.fsdecode`."""
        return (json.dumps({**asdict(self), "key": os.fsdecode(self.key)}) + "\n").encode("ascii")


@dataclass(frozen=True)
class MendedSource:
    """A source that was converted with a `warning`: of a mended header, of several pictures, or of a library."""

    split: str
    key: bytes
    warning: str


@dataclass(frozen=True)
class ArrayPart:
    """An array's values for the samples of one shard."""

    entry: ShardEntry | None
    """The finished file with the values; None for a small array, which gets one file when the set is published."""
    numbers: NDArray[Any]
    """The values of a small array; for other arrays the crc32 of each value."""


@dataclass(frozen=True)
class ShardRecord:
    """The results of a finished task. `entry`, of the shard, is None without pixels, or if all sources were refused."""

    entry: ShardEntry | None
    rows: NDArray[np.void]
    """The index rows of the samples."""
    rejects: tuple[Reject, ...]
    mended: tuple[MendedSource, ...]
    sources_sha256: str
    """The digest of the sources' fingerprints, which changes if a source changes."""
    level_sums: NDArray[np.int64]
    """The total of `sum_levels` over the samples that were measured, int64 (4, channels)."""
    facts: Mapping[str, int] = field(default_factory=dict)
    """Name in `decode.FACTS` -> the number of pictures of which it is true."""
    arrays: Mapping[str, ArrayPart] = field(default_factory=dict)
    """The values of the task's arrays, by name; empty if there is no sample."""

    @property
    def num_sources(self) -> int:
        return len(self.rows) + len(self.rejects)

    @property
    def files(self) -> list[FileEntry]:
        return [entry for entry in (self.entry, *(part.entry for part in self.arrays.values())) if entry is not None]


def joined_arrays(plan: Plan, rows: NDArray[np.void], records: Sequence[ShardRecord]) -> dict[str, NDArray[Any]]:
    """Returns the values or checksums (`ArrayPart.numbers`) of each array of a split, by name, for all its samples.

    `rows` are the index rows of the samples, and `records` the records of the tasks that made them. The values of
    columns come from tables, by the keys in `rows`.
    """
    columns, made = plan.collection.columns, [record.arrays for record in records if record.arrays]
    return {
        **{name: np.concatenate([arrays[name].numbers for arrays in made]) for name in (made[0] if made else ())},
        **(columns.of(rows["key"].tolist()) if columns else {}),
    }


def _record_path(task: ShardTask) -> Path:
    return task.out / WORK_FOLDER / f"{task.name}.json"


def refused_path(task: ShardTask) -> Path:
    return task.out / WORK_FOLDER / f"{task.name}.refused.jsonl"


def without_record(tasks: Sequence[ShardTask]) -> list[ShardTask]:
    """Returns the tasks without a record. Does not check whether the sources of the other tasks have changed.

    Lists the work folder rather than looking up each file: a network filesystem refreshes the listing once this process
    has written to the folder, but may go on reporting a single file as missing. Raises FileNotFoundError if the work
    folder is gone.
    """
    there = set(os.listdir(tasks[0].out / WORK_FOLDER)) if tasks else set()
    return [task for task in tasks if _record_path(task).name not in there]


def written_since(tasks: Sequence[ShardTask]) -> list[ShardTask]:
    """Returns the tasks with a file that is newer than the task's record.

    The file may still be sound, as two processes may have made the same shard. Raises FileNotFoundError if the work
    folder is gone.
    """

    def is_newer(task: ShardTask) -> bool:
        recorded = _record_path(task).stat().st_mtime_ns
        files = [task.out / name for name in task.file_names]
        return any(file.exists() and file.stat().st_mtime_ns > recorded for file in files)

    with ThreadPoolExecutor(_STAT_THREADS, "shardio-records") as pool:
        return [task for task, newer in zip(tasks, pool.map(is_newer, tasks), strict=True) if newer]


def save_record(task: ShardTask, record: ShardRecord) -> None:
    """Writes the record of a task, with a checksum: its labels and crc32s are published without another check."""
    fields = {
        "entry": record.entry and record.entry.content(),
        "rows": base64.b64encode(record.rows.tobytes()).decode("ascii"),
        "rejects": [[r.split, os.fsdecode(r.key), r.reason, r.detail] for r in record.rejects],
        "mended": [[m.split, os.fsdecode(m.key), m.warning] for m in record.mended],
        "sources_sha256": record.sources_sha256,
        "level_sums": record.level_sums.tolist(),
        "facts": record.facts,
        "arrays": {
            name: [part.entry and part.entry.content(), base64.b64encode(part.numbers.tobytes()).decode("ascii")]
            for name, part in record.arrays.items()
        },
    }
    document = {**fields, "sha256": _checksum(fields)}
    write_atomic(_record_path(task), json.dumps(document).encode("ascii"))


def _checksum(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields).encode("ascii")).hexdigest()


def discard_record(task: ShardTask) -> None:
    """Removes the task's record, so no process publishes its shard while the shard is being replaced."""
    _record_path(task).unlink(missing_ok=True)


def load_records(tasks: Sequence[ShardTask]) -> dict[str, ShardRecord]:
    """Returns the records of the finished tasks, by name of the shard. See `load_record`."""
    with ThreadPoolExecutor(_STAT_THREADS, "shardio-records") as pool:
        found = zip(tasks, pool.map(load_record, tasks), strict=True)
        return {task.name: record for task, record in found if record is not None}


def load_record(task: ShardTask) -> ShardRecord | None:
    """Returns the task's record; None if it is missing or damaged, or if the task's sources have changed since."""
    try:
        fields = json.loads(read_untrusted(_record_path(task)))
        if fields.pop("sha256") != _checksum(fields):
            return None
        row = task.pixels_row
        entry = None if row is None or not fields["entry"] else ShardEntry(**fields["entry"], row=row)
        arrays = {}
        for spec in task.arrays if fields["arrays"] else ():
            content, numbers = fields["arrays"][spec.name]
            file = content and ShardEntry(**content, row=spec.row)
            row = spec.row if spec.row.is_small else CRC32_ROW
            found = np.frombuffer(base64.b64decode(numbers), row.dtype).reshape(-1, *row.shape)
            arrays[spec.name] = ArrayPart(file, found)
        record = ShardRecord(
            entry,
            np.frombuffer(base64.b64decode(fields["rows"]), index_dtype(task.key_nbytes, has_label=task.has_label)),
            tuple(Reject(split, os.fsencode(key), *rest) for split, key, *rest in fields["rejects"]),
            tuple(MendedSource(split, os.fsencode(key), warning) for split, key, warning in fields["mended"]),
            fields["sources_sha256"],
            np.array(fields["level_sums"], np.int64),
            fields["facts"],
            arrays,
        )
        if any((task.out / one.file).stat().st_size != one.nbytes for one in record.files):
            return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None  # no record, or a damaged record: the shard is made again
    return record if record.sources_sha256 == digest(task.origin.fingerprints(task.sources)) else None


def note_refused(task: ShardTask, reject: Reject) -> None:
    """Appends a refused source to the task's list of refused sources. A repair has no such list."""
    if task.wanted is not None:
        return
    path = refused_path(task)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    with naming(path), open_untrusted(path, flags, sole_name=True) as file:
        write_all(file.fileno(), reject.to_line())


def refused_so_far(task: ShardTask) -> list[Reject]:
    """Returns the sources that an unfinished task has refused so far, in the order of `task.sources`."""
    try:
        lines = read_untrusted(refused_path(task)).splitlines()
    except FileNotFoundError:
        return []
    # Two processes may do the task at the same time, and a full disk may have truncated a line.
    found = {reject.key: reject for line in lines if (reject := _parse_reject(line)) is not None}
    return [found[source.key] for source in task.sources if source.key in found]


def _parse_reject(line: bytes) -> Reject | None:
    """Returns the refused source in a line of rejects.jsonl; None if the line is invalid."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        fields = json.loads(line)
        split, key, reason, detail = (fields[name] for name in ("split", "key", "reason", "detail"))
        if all(isinstance(text, str) for text in (split, key, reason, detail)):
            return Reject(split, os.fsencode(key), reason, detail)
    return None


def read_rejects(folder: Path, entry: RejectsEntry | None) -> list[Reject]:
    """Returns the refused sources in the rejects.jsonl of the set in `folder`; [] for None. Raises FormatError if the
    file is missing or not the one that `entry` describes, or for a bad line."""
    rejects = []
    data = b"" if entry is None else read_checked(FolderStorage(folder), entry).tobytes()
    for number, line in enumerate(data.splitlines(), start=1):
        if (reject := _parse_reject(line)) is None:
            raise FormatError(
                f"{folder / REJECTS_NAME}: line {number}: expected a JSON object with split, key, reason and detail, "
                f"found {line[:80]!r}; `shardio verify` lists all damage, and says how to repair it"
            )
        rejects.append(reject)
    return rejects


def write_rejects(folder: Path, rejects: Iterable[Reject]) -> RejectsEntry | None:
    """Writes rejects.jsonl and returns its manifest entry. Without rejects, removes the file and returns None."""
    lines = [reject.to_line() for reject in rejects]
    if not lines:
        (folder / REJECTS_NAME).unlink(missing_ok=True)  # of an earlier call, which ended with too many
        return None
    data = b"".join(lines)
    write_atomic(folder / REJECTS_NAME, data)
    return RejectsEntry(REJECTS_NAME, len(data), hashlib.sha256(data).hexdigest(), len(lines))
