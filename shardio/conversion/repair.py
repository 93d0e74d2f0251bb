"""`repair`: files that `verify` finds damaged in a set are made again from the sources, to the same bytes.

The manifest is the measure: a file takes the place of a damaged one only if it has the sha256 that the manifest
promises. So no repair can make a set worse, two at the same time do no harm, one that was killed is run again, and a
reader that has the damaged file mapped keeps what it has mapped.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.amounts import count_workers
from shardio.conversion.array_files import make_array
from shardio.conversion.arrays import ArraySpec
from shardio.conversion.claim import copy_again
from shardio.conversion.engines.processes import run_tasks
from shardio.conversion.images.decode import read_size
from shardio.conversion.options import MASK, SourceOptions, read_options
from shardio.conversion.plan import Plan, ShardTask, difference, library_versions, make_plan
from shardio.conversion.records import ShardRecord
from shardio.conversion.report import Monitor
from shardio.conversion.sources.collection import Collection as SourceCollection
from shardio.conversion.sources.collection import Source
from shardio.conversion.sources.detect import SourceKind, find_empty, scan, without_classes
from shardio.conversion.task import reject_of
from shardio.conversion.writing.set_writer import Reject, read_rejects
from shardio.conversion.writing.shard_file import IndexRows
from shardio.errors import ConvertError, DecodeError, FormatError, SourceError
from shardio.format.checksum import crc32
from shardio.format.entries import ArrayEntry, FileEntry, IndexEntry, ShardEntry
from shardio.format.layout import HEADER_NBYTES, WORK_FOLDER, sample_nbytes
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import load_manifest
from shardio.sets.local import hinting_at_order
from shardio.sets.rows import index_content
from shardio.sets.verify import verify
from shardio.system.files import sweep_temporaries, write_atomic
from shardio.system.opening import open_regular, read_untrusted
from shardio.system.threads import ThreadPool

# Samples that came out different are named one by one up to so many in a shard.
_MOST_NAMED = 5


@dataclass(frozen=True)
class RepairReport:
    """The outcome of a repair."""

    path: str
    repaired: tuple[str, ...]
    """Files that were damaged or missing, and are now what was published."""


def repair(
    path: str | os.PathLike[str],
    src: str | os.PathLike[str],
    *,
    source: SourceKind = "auto",
    columns: str | os.PathLike[str] | None = None,
    masks: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    on_verify: Callable[[int, int], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> RepairReport:
    """Makes the damaged files of the set in the folder `path` again from `src`, which it was converted from.

    The whole set is read to find them. `source`, `columns` and `masks` are those of `convert`; an index with columns
    can be made again only from their file, masks from their folder, and all else without them. Images in parquet files
    are first copied out into the set's folder, and the copies removed in the end: of two repairs at the same time, one
    may have to be run again. A set of a dataset of Python cannot be repaired. `workers` is how many cores to use, by
    default all. `on_verify` is called, in any thread, with (bytes read since, bytes in all); `on_progress` in this
    thread with (sources done, sources to do).

    Raises ConvertError if the set cannot be made again, since `convert` did not make it or `src` lists other images
    now; and if files come out other than they were, since an image or a library has changed, or if an index lacks its
    columns, or masks their folder: then these are left as they are and all others are repaired. Raises FormatError if
    the manifest itself is damaged, and SetNotFoundError if there is none.
    """
    folder = Path(os.path.abspath(path))
    if not isinstance(src, (str, os.PathLike)):
        raise TypeError(
            f"expected the path of the images, found {type(src).__name__}. Sets of datasets of Python cannot be "
            "repaired: convert the dataset again into a new folder"
        )
    workers = count_workers(workers)
    sources = SourceOptions(source, columns=columns, masks=masks)
    sources.check(src, None)
    with hinting_at_order(src, "OUT, the set, comes first, and SRC, the images, second"):
        manifest = load_manifest(folder)
    plan = _plan_again(folder, manifest, src, sources)
    sweep_temporaries(folder)
    damaged = frozenset(problem.file for problem in verify(folder, workers=workers, on_progress=on_verify).problems)
    lacking = _without_columns(manifest, plan) & damaged
    masks_files = _without_masks(manifest, plan)
    lacking_masks = masks_files & damaged
    work = _Repair(manifest, plan, damaged - lacking - lacking_masks, workers)
    try:
        if work.damaged:
            copy_again(plan)
        work.run(on_progress or (lambda done, total: None))
    finally:
        shutil.rmtree(folder / WORK_FOLDER, ignore_errors=True)
    if work.faults:
        faults = "; ".join(f"{file}: {fault}" for file, fault in work.faults.items())
        hint = (
            ". Images were refused for their masks, too: give the folder of these by `--masks`" if masks_files else ""
        )
        raise ConvertError(
            f"{folder}: {len(work.faults)} files cannot be made again, and are left as they are: {faults}. Images have "
            f"changed since, or the libraries have: the set was made with {manifest.provenance.get('libraries')}, and "
            f"these are {library_versions()}{hint}"
        )
    if lacking:
        raise ConvertError(
            f"{folder}: {', '.join(sorted(lacking))} cannot be made again without the file of its columns: give it by "
            "`--columns`, from Python `columns=`"
        )
    if lacking_masks:
        raise ConvertError(
            f"{folder}: {', '.join(sorted(lacking_masks))} cannot be made again without the folder of the masks: give "
            "it by `--masks`, from Python `masks=`"
        )
    return RepairReport(str(folder), tuple(work.repaired))


def _without_columns(manifest: Manifest, plan: Plan) -> frozenset[str]:
    """Returns the indexes that have columns, if the caller has not given their file."""
    indexes = [split.index for split in manifest.splits.values()]
    return frozenset(index.file for index in indexes if index.columns and plan.columns is None)


def _without_masks(manifest: Manifest, plan: Plan) -> frozenset[str]:
    """Returns the files of the masks that `convert` has made, if the caller has not given their folder."""
    if "masks" not in manifest.provenance["conversion"] or any(spec.source == "file" for spec in plan.arrays):
        return frozenset()
    arrays = [split.arrays[MASK] for split in manifest.splits.values() if MASK in split.arrays]
    return frozenset(entry.file for array in arrays for entry in array.files)


def _plan_again(folder: Path, manifest: Manifest, src: str | os.PathLike[str], sources: SourceOptions) -> Plan:
    """Returns the plan by which the set was made."""
    there = manifest.provenance.get("conversion")
    if not isinstance(there, dict):
        change = manifest.provenance.get("change")
        if isinstance(change, dict):
            raise ConvertError(
                f"{folder}: expected a set that `convert` has made, found one that {change.get('operation')!r} made of "
                "another: repair that one, and make this set of it again"
            )
        raise ConvertError(f"{folder}: expected a set that `convert` has made, found another: copy it again")
    try:
        options = read_options(there)
    except ValueError as error:
        raise ConvertError(f"{folder}: {error}") from None
    for collection in _readings(Path(src), sources.source):
        table = sources.read_columns(collection)
        collection, arrays = sources.add_masks(collection, options)
        plan = make_plan(folder, collection, options, table, arrays=arrays)
        # The names of classes are in the manifest alone, and not every kind of storage has them.
        ignored = {"class_names_sha256"}
        ignored |= set() if table else {"columns_sha256"}
        ignored |= {"masks"} if sources.masks is None else set()
        then, now = ({k: v for k, v in made.items() if k not in ignored} for made in (there, plan.describe()))
        changed = difference(then, now)
        if not changed:
            return plan
    raise ConvertError(f"{folder}: cannot be made again from {src} ({changed})")


def _readings(src: Path, source: SourceKind) -> Iterator[SourceCollection]:
    """Yields what SRC may have been taken for. The manifest tells which it was, so the caller is not asked."""
    collection = scan(src, source, accept_layout=True, empty_classes="keep")
    yield collection
    if empty := find_empty(collection):
        with contextlib.suppress(SourceError):
            yield without_classes(collection, empty)


@dataclass
class _Repair:
    """One repair of the set in `plan.out`. Not thread safe."""

    manifest: Manifest
    plan: Plan
    damaged: frozenset[str]
    workers: int
    repaired: list[str] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    """Why a file cannot be made again, by file."""
    _records: dict[str, ShardRecord] = field(default_factory=dict)
    """Records of the tasks that were done again, by shard."""
    _indexes: dict[str, Mapping[bytes, int]] = field(default_factory=dict)
    """The crc32 of each key, by split, of the indexes that were read."""

    @cached_property
    def _shards(self) -> Mapping[str, ShardEntry]:
        return {shard.file: shard for split in self.manifest.splits.values() for shard in split.shards}

    def run(self, on_progress: Callable[[int, int], None]) -> None:
        """Makes all damaged files again. Shards come first: indexes and rejects.jsonl are made from what they hold."""
        self._mend_shards(on_progress)
        for name, split in self.manifest.splits.items():
            if split.index.file in self.damaged:
                self._replace(split.index, self._index(name))
        if self.manifest.rejects.file in self.damaged:
            self._replace(self.manifest.rejects, self._reject_lines())
        self._mend_arrays()
        for file in self.damaged.difference(self.repaired, self.faults):
            self.faults[file] = "no shard of this conversion"

    def _replace(self, entry: FileEntry, content: Iterable[bytes | memoryview]) -> None:
        try:
            parts = list(content)
        except DecodeError as error:
            self.faults[entry.file] = str(error)
            return
        sha256 = hashlib.sha256()
        for part in parts:
            sha256.update(part)
        if sha256.hexdigest() == entry.sha256:
            write_atomic(self.plan.out / entry.file, *parts)
            self.repaired.append(entry.file)
        else:
            self.faults[entry.file] = f"expected sha256 {entry.sha256}, made {sha256.hexdigest()}"

    # --- which sources were refused -----------------------------------------------------------------------------------

    @cached_property
    def _refused_keys(self) -> Mapping[str, Collection[bytes] | None]:
        """The keys of each split's refused sources, as a sound file tells; None if there is no such file."""
        if self.manifest.rejects.file not in self.damaged:
            rejects = read_rejects(self.plan.out / self.manifest.rejects.file)
            return {split: {r.key for r in rejects if r.split == split} for split in self.manifest.splits}
        found: dict[str, Collection[bytes] | None] = {}
        for name, split in self.manifest.splits.items():
            listed = {source.key for task in self._tasks(name) for source in task.sources}
            found[name] = None if split.index.file in self.damaged else listed - self._crc32s_of(name).keys()
        return found

    def _is_refused(self, task: ShardTask, source: Source) -> bool:
        """Whether a source was refused, if its task was not done again. Where no file tells, it was done again."""
        return task.name not in self._shards or source.key in (self._refused_keys[task.split] or ())

    # --- shards -------------------------------------------------------------------------------------------------------

    def _mend_shards(self, on_progress: Callable[[int, int], None]) -> None:
        tasks = []
        for task in self.plan.tasks:
            shard = self._shards.get(task.name)
            if shard is not None:
                in_doubt = self._refused_keys[task.split] is None and shard.num_samples != len(task.sources)
                if task.name in self.damaged or in_doubt:
                    tasks.append(replace(task, expected_sha256=shard.sha256))
        total = sum(len(task.sources) for task in tasks)  # all of which may be refused: the manifest judges
        monitor = Monitor(total, total, lambda progress: on_progress(progress.done, progress.total))
        for task, record in zip(tasks, run_tasks(tasks, self.workers, monitor.report), strict=True):
            self._records[task.name] = record
            if record.entry != self._shards[task.name]:
                made = record.entry.sha256 if record.entry else "nothing"
                changes = self._changes(task, record)
                self.faults[task.name] = f"expected sha256 {task.expected_sha256}, made {made}{changes}"
            elif task.name in self.damaged:
                self.repaired.append(task.name)

    def _changes(self, task: ShardTask, record: ShardRecord) -> str:
        """Returns which samples differ from those that were published, as far as the index tells."""
        if self.manifest.splits[task.split].index.file in self.damaged:
            return ""
        published = self._crc32s_of(task.split)
        then = {source.key: published[source.key] for source in task.sources if source.key in published}
        now = {row["key"]: row["crc32"] for row in record.rows}
        changed = sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key))
        named = ", ".join(map(os.fsdecode, changed[:_MOST_NAMED])) + (", ..." if len(changed) > _MOST_NAMED else "")
        return f" ({len(changed)} samples differ: {named})"

    # --- arrays -------------------------------------------------------------------------------------------------------

    def _mend_arrays(self) -> None:
        """Makes damaged files of arrays again, from shards and indexes that are sound by now."""
        specs = {spec.name: spec for spec in self.plan.arrays}
        for split_name, split in self.manifest.splits.items():
            for name, array in split.arrays.items():
                files = {entry.file: entry for entry in array.files if entry.file in self.damaged}
                if name not in specs:
                    self.faults |= dict.fromkeys(
                        files, f"`convert` did not make the array {name!r}: copy the file again"
                    )
                    continue
                for task in self._tasks(split_name) if files else ():
                    file = task.array_name(specs[name])
                    if file in files:
                        self._mend_array(task, specs[name], files[file])
                if array.crc32.file in files:
                    self._mend_crc32s(array)

    def _mend_array(self, task: ShardTask, spec: ArraySpec, entry: FileEntry) -> None:
        try:
            rows = self._published_rows(task)
            made = make_array(task, spec, rows, self.workers, lambda: None, entry.sha256).entry
        except (ConvertError, FormatError) as error:
            self.faults[entry.file] = str(error)
            return
        if made == entry:
            self.repaired.append(entry.file)
        else:
            self.faults[entry.file] = f"expected sha256 {entry.sha256}, made {made.sha256}"

    def _published_rows(self, task: ShardTask) -> NDArray[np.void]:
        """Returns the index rows of a shard's samples."""
        split = self.manifest.splits[task.split]
        for file in (split.index.file, task.name):
            if file in self.damaged and file not in self.repaired:
                raise ConvertError(f"{file} is damaged, from which it is made")
        rows = _read_index(self.plan.out, split.index)
        names = [shard.file for shard in split.shards]
        start = sum(shard.num_samples for shard in split.shards[: names.index(task.name)])
        return rows[start : start + self._shards[task.name].num_samples]

    def _mend_crc32s(self, array: ArrayEntry) -> None:
        """Makes the checksums of an array again, from its files."""
        if wrong := [one.file for one in array.shards if one.file in self.damaged and one.file not in self.repaired]:
            self.faults[array.crc32.file] = f"{wrong[0]} is damaged, from which it is made"
            return
        found = [crc for one in array.shards for crc in _crc32s(self.plan.out / one.file, array.row.nbytes)]
        header = array.crc32.header(self.manifest.sample_shape)
        self._replace(array.crc32, (header, np.array(found, array.crc32.row.dtype).tobytes()))

    # --- indexes and rejects.jsonl ------------------------------------------------------------------------------------

    def _tasks(self, split: str) -> list[ShardTask]:
        return [task for task in self.plan.tasks if task.split == split]

    def _crc32s_of(self, split: str) -> Mapping[bytes, int]:
        """Returns the crc32 of each key. The index is read once, though every shard may have changed."""
        if split not in self._indexes:
            rows = _read_index(self.plan.out, self.manifest.splits[split].index)
            self._indexes[split] = dict(zip(rows["key"].tolist(), rows["crc32"].tolist(), strict=True))
        return self._indexes[split]

    def _index(self, split: str) -> Iterator[bytes | memoryview]:
        rows = np.concatenate([self._rows(task) for task in self._tasks(split)])
        yield from index_content(self.plan.columns.extend(rows) if self.plan.columns else rows)

    def _rows(self, task: ShardTask) -> NDArray[np.void]:
        """Returns the shard's index rows; if it was sound, from the sums of its pixels and its sources' headers."""
        if task.name in self._records:
            return self._records[task.name].rows
        rows = IndexRows()
        kept = [source for source in task.sources if not self._is_refused(task, source)]
        if not kept:
            return rows.to_array(task.key_nbytes)

        def size(source: Source) -> tuple[int, int]:
            try:
                data = task.origin.read(source)
                assert isinstance(data, bytes)  # a path is no dataset
                return read_size(data, task.options.decode)
            except DecodeError as error:
                raise DecodeError(error.reason, f"{os.fsdecode(source.key)}: {error.detail}") from None

        with ThreadPool(self.workers, "shardio-sizes") as pool:
            crc32s = _crc32s(self.plan.out / task.name, sample_nbytes(self.manifest.sample_shape))
            for source, source_size, crc in zip(kept, pool.map(size, kept), crc32s, strict=True):
                rows.append(label=source.label, key=source.key, source_size=source_size, crc32=crc)
        return rows.to_array(task.key_nbytes)

    def _reject_lines(self) -> Iterator[bytes]:
        for task in self.plan.tasks:
            if task.name in self._records:
                rejects: Iterable[Reject | None] = self._records[task.name].rejects
            else:
                rejects = (reject_of(task, source) for source in task.sources if self._is_refused(task, source))
            yield from (reject.to_line() for reject in rejects if reject is not None)


def _read_index(folder: Path, index: IndexEntry) -> NDArray[np.void]:
    return np.frombuffer(read_untrusted(folder / index.file), index.dtype, offset=HEADER_NBYTES)


def _crc32s(path: Path, nbytes: int) -> Iterator[int]:
    """Yields the crc32 of each sample of a shard."""
    with io.BufferedReader(open_regular(path)[0]) as file:
        file.seek(HEADER_NBYTES)
        while pixels := file.read(nbytes):
            yield crc32(pixels)
