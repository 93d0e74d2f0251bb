"""The record of a shard task: written when its shard is published, and read by every later run of the conversion.

A task with a record is skipped for as long as its sources have not changed. The record of a task that has a journal is
also written ahead of the shard's name, so that a kill between the two loses nothing. Until there is a record, a list of
refused sources is what is known of them.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.arrays import ArraySpec
from shardio.conversion.plan import ShardTask
from shardio.conversion.sources.collection import UNREADABLE, digest
from shardio.conversion.writing.set_writer import Reject
from shardio.format.entries import ArrayShard, ShardEntry
from shardio.format.layout import WORK_FOLDER, index_dtype
from shardio.system.files import write_all, write_atomic
from shardio.system.opening import naming, open_untrusted, read_untrusted
from shardio.system.threads import ThreadPool

# Looking whether the sources of finished shards have changed is waiting, on a network filesystem.
_STAT_THREADS = 16


@dataclass(frozen=True)
class Mended:
    """A source that was taken although something had to be mended, or a library warned of it."""

    split: str
    key: bytes
    warning: str


@dataclass(frozen=True)
class ArrayPart:
    """A finished file with an array's values for the samples of one shard."""

    entry: ArrayShard
    crc32s: NDArray[np.uint32]


@dataclass(frozen=True)
class ShardRecord:
    """The results of a task that is done. `entry` is None if every one of its sources was refused."""

    entry: ShardEntry | None
    rows: NDArray[np.void]
    rejects: tuple[Reject, ...]
    mended: tuple[Mended, ...]
    sources_sha256: str
    hashes: bytes | None = None
    """The hashes of the task's sources, end to end and in order, if the task asked for them."""
    arrays: Mapping[str, ArrayPart] = field(default_factory=dict)
    """The files with the values of the task's arrays, by array."""

    @property
    def num_sources(self) -> int:
        return len(self.rows) + len(self.rejects)

    @property
    def has_unreadable(self) -> bool:
        """Whether a source could not be read, which may have been a passing fault of its storage."""
        return any(reject.reason == UNREADABLE for reject in self.rejects)


def _path(task: ShardTask, kind: Literal["json", "ahead", "refused.jsonl"]) -> Path:
    """Returns the path of the task's record, of that which is written ahead, or of the list of refused sources."""
    return task.out / WORK_FOLDER / f"{task.name}.{kind}"


def _array_path(task: ShardTask, spec: ArraySpec) -> Path:
    """Returns the path of the record of an array's file."""
    return task.out / WORK_FOLDER / f"{task.array_name(spec)}.json"


def _identify_file(path: Path) -> list[int]:
    """Returns what stays the same when the file is renamed, and differs for any other file of the name."""
    status = path.stat()
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def _adopt_ahead(task: ShardTask) -> None:
    """Makes what was written ahead the record, if the shard there is the very file that it was written for.

    The file was synced before it got its name, so it is as whole as one with a record.
    """
    path = _path(task, "ahead")
    try:
        is_published = json.loads(read_untrusted(path))["file"] == _identify_file(task.out / task.name)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return
    if is_published:
        with contextlib.suppress(FileNotFoundError):  # another process was quicker
            path.replace(_path(task, "json"))


def without_record(tasks: Sequence[ShardTask], of: Literal["shard", "all"] = "all") -> list[ShardTask]:
    """Returns the tasks that lack the record of their shard, or one of all their records, whether or not the sources
    of the others are still the same.

    Reads the folder's listing, which a network filesystem makes anew once this process has written there; it may go on
    for a while to deny a single file that was not there when it was looked for. Raises FileNotFoundError if there is no
    work folder any more.
    """
    if not tasks:
        return []
    there = set(os.listdir(tasks[0].out / WORK_FOLDER))
    return [task for task in tasks if not there.issuperset(_record_names(task, of))]


def _record_names(task: ShardTask, of: Literal["shard", "all"]) -> list[str]:
    arrays = [] if of == "shard" else [_array_path(task, spec).name for spec in task.arrays]
    return [_path(task, "json").name, *arrays]


def written_since(tasks: Sequence[ShardTask]) -> list[ShardTask]:
    """Returns the tasks of which a file was written to after its record. The files may be sound all the same: two
    processes may have made a shard. Raises FileNotFoundError if there is no work folder any more."""

    def is_newer(task: ShardTask) -> bool:
        pairs = [(task.name, _path(task, "json"))]
        pairs += [(task.array_name(spec), _array_path(task, spec)) for spec in task.arrays]
        there = [(task.out / file, record) for file, record in pairs if (task.out / file).exists()]
        return any(file.stat().st_mtime_ns > record.stat().st_mtime_ns for file, record in there)

    with ThreadPool(_STAT_THREADS, "shardio-records") as pool:
        return [task for task, newer in zip(tasks, pool.map(is_newer, tasks), strict=True) if newer]


def save_ahead(task: ShardTask, record: ShardRecord, temporary: Path) -> None:
    """Writes the record that counts as soon as this temporary file has the shard's name."""
    write_atomic(_path(task, "ahead"), _dump_record(record, file=_identify_file(temporary)))


def discard_ahead(task: ShardTask) -> None:
    _path(task, "ahead").unlink(missing_ok=True)


def save_record(task: ShardTask, record: ShardRecord) -> None:
    write_atomic(_path(task, "json"), _dump_record(record))


def discard_record(task: ShardTask) -> None:
    """Makes the task count as not done, so that no process publishes its shard, which is about to be replaced."""
    discard_ahead(task)
    _path(task, "json").unlink(missing_ok=True)
    for spec in task.arrays:
        _array_path(task, spec).unlink(missing_ok=True)


def discard_refused(task: ShardTask) -> None:
    _path(task, "refused.jsonl").unlink(missing_ok=True)


def note_refused(task: ShardTask, reject: Reject) -> None:
    """Appends the line of rejects.jsonl, so that it is known of a task that does not come to its end."""
    path = _path(task, "refused.jsonl")
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    with naming(path), open_untrusted(path, flags, sole_name=True) as file:
        write_all(file.fileno(), reject.to_line())


def refused_so_far(task: ShardTask) -> list[bytes]:
    """Returns the lines of rejects.jsonl for a task in any state, in the order of its sources."""
    path = _path(task, "refused.jsonl")
    try:
        lines = read_untrusted(path).splitlines(keepends=True)
    except FileNotFoundError:
        return []
    numbers = {source.key: number for number, source in enumerate(task.sources)}
    found: dict[int, bytes] = {}
    for line in lines:
        # Two processes may do the task at the same time, and a full disk may have cut a line.
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            found[numbers[os.fsencode(json.loads(line)["key"])]] = line
    return [line for _, line in sorted(found.items())]


def _dump_record(record: ShardRecord, **more: object) -> bytes:
    return _seal(
        entry=record.entry and asdict(record.entry),
        rows=base64.b64encode(record.rows.tobytes()).decode("ascii"),
        rejects=[[r.split, os.fsdecode(r.key), r.reason, r.detail] for r in record.rejects],
        mended=[[m.split, os.fsdecode(m.key), m.warning] for m in record.mended],
        sources_sha256=record.sources_sha256,
        hashes=record.hashes and base64.b64encode(record.hashes).decode("ascii"),
        **more,
    )


def _seal(**fields: object) -> bytes:
    """Returns a record as JSON. It has a checksum: a label or a crc32 in it is published as it is."""
    text = json.dumps(fields)
    return json.dumps({**fields, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode("ascii")


def _read_sealed(path: Path) -> dict[str, Any]:
    """Returns the fields of a record. Raises OSError or ValueError if there is none, or a damaged one."""
    fields = json.loads(read_untrusted(path))
    if not isinstance(fields, dict):
        raise ValueError
    seal = fields.pop("sha256", None)
    if seal != hashlib.sha256(json.dumps(fields).encode()).hexdigest():
        raise ValueError
    return fields


def load_records(tasks: Sequence[ShardTask]) -> dict[str, ShardRecord]:
    """Returns the records of those tasks that are done, by shard."""
    with ThreadPool(_STAT_THREADS, "shardio-records") as pool:
        found = zip(tasks, pool.map(load_record, tasks), strict=True)
        return {task.name: record for task, record in found if record is not None}


def load_record(task: ShardTask) -> ShardRecord | None:
    """Returns the record of a task that is done and whose sources are still the same; None if it must be done."""
    record = load_shard_record(task)
    if record is None or record.entry is None or not task.arrays:
        return record
    parts = {spec.name: load_array(task, spec, record) for spec in task.arrays}
    arrays = {name: part for name, part in parts.items() if part is not None}
    return replace(record, arrays=arrays) if len(arrays) == len(parts) else None


def save_array(task: ShardTask, spec: ArraySpec, record: ShardRecord, part: ArrayPart) -> None:
    """Writes the record of an array's file, made for the shard that has this record."""
    document = _seal(
        shard=_identify_shard(record),
        row=[spec.row.dtype, list(spec.row.shape)],
        entry=part.entry.content(),
        crc32s=base64.b64encode(part.crc32s.astype("<u4").tobytes()).decode("ascii"),
    )
    write_atomic(_array_path(task, spec), document)


def save_no_array(task: ShardTask, spec: ArraySpec, record: ShardRecord) -> None:
    """Writes that a shard without samples, which has this record, needs no file of the array."""
    write_atomic(_array_path(task, spec), _seal(shard=_identify_shard(record), entry=None))


def load_array(task: ShardTask, spec: ArraySpec, record: ShardRecord) -> ArrayPart | None:
    """Returns the file of an array that goes with the shard that has this record; None if it must be made."""
    try:
        document = _read_sealed(_array_path(task, spec))
        entry = ArrayShard(**document["entry"], row=spec.row)
        crc32s = np.frombuffer(base64.b64decode(document["crc32s"]), "<u4")
        if (
            document["shard"] == _identify_shard(record)
            and document["row"] == [spec.row.dtype, list(spec.row.shape)]
            and entry.num_samples == len(crc32s) == len(record.rows)
            and (task.out / entry.file).stat().st_size == entry.nbytes == spec.row.file_nbytes(entry.num_samples)
        ):
            return ArrayPart(entry, crc32s)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass  # no record, or a damaged one: the work is done again
    return None


def _identify_shard(record: ShardRecord) -> list[str | None]:
    """Returns what differs for any other shard, and for the same one made of other sources."""
    return [None if record.entry is None else record.entry.sha256, record.sources_sha256]


def find_shard(task: ShardTask) -> ShardRecord | None:
    """Returns the record of a shard that need not be made again, though its arrays may have to be made."""
    record = load_shard_record(task)
    return None if record is None or record.has_unreadable else record


def load_shard_record(task: ShardTask) -> ShardRecord | None:
    """Returns what `load_record` does, without the arrays: the shard is done, and they may have to be made."""
    _adopt_ahead(task)
    try:
        document = _read_sealed(_path(task, "json"))
        entry = document["entry"] and ShardEntry(**document["entry"])
        record = ShardRecord(
            entry,
            np.frombuffer(base64.b64decode(document["rows"]), index_dtype(task.key_nbytes)),
            tuple(Reject(split, os.fsencode(key), *rest) for split, key, *rest in document["rejects"]),
            tuple(Mended(split, os.fsencode(key), warning) for split, key, warning in document["mended"]),
            document["sources_sha256"],
            document["hashes"] and base64.b64decode(document["hashes"]),
        )
        if entry and (task.out / entry.file).stat().st_size != entry.nbytes:
            return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None  # no record, or a damaged one: the work is done again
    return record if record.sources_sha256 == digest(task.origin.fingerprints(task.sources)) else None
