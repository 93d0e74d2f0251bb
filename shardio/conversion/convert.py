"""Converts images into a shard set. If a conversion fails, nothing is published and finished shards are kept.

    scan -> plan -> claim OUT -> shard tasks -> publish -> remove OUT/.convert

An unfinished conversion keeps its plan and a record of each finished shard in OUT/.convert. The same call, made again,
makes the remaining shards.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from shardio.conversion.claim import claimed, leave, published, turn
from shardio.conversion.collect import Src, check, collect
from shardio.conversion.engine import Engine
from shardio.conversion.options import ConvertOptions, Progress, count_bad, count_workers, with_options
from shardio.conversion.plan import Plan, ShardTask, library_versions, make_plan
from shardio.conversion.records import (
    ShardRecord,
    discard_record,
    joined_arrays,
    load_records,
    refused_so_far,
    without_record,
    write_rejects,
    written_since,
)
from shardio.conversion.report import (
    ConvertReport,
    Monitor,
    TooManyBad,
    UnfinishedParts,
    bar_of,
    describe,
    report_set,
    report_work,
)
from shardio.conversion.sources.collection import UNREADABLE
from shardio.conversion.sources.names import numbers_up_to
from shardio.errors import ConvertError, FormatError, SpaceError, shortened
from shardio.format.entries import ArrayEntry, SplitEntry
from shardio.format.layout import MANIFEST_NAME, REJECTS_NAME, has_label
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import commit_manifest
from shardio.sets.levels import LEVELS, first_split, levels_of
from shardio.sets.names import check_local
from shardio.sets.rows import ArrayWriter, write_crc32s, write_index
from shardio.sets.storage import FileCopier, FolderStorage
from shardio.system.files import fsync_folder


@with_options(ConvertOptions)
def convert(src: Src, out: str | os.PathLike[str], options: ConvertOptions) -> ConvertReport:
    """Converts the images in `src` into a shard set in the folder `out`, and returns a report of it.

    `src` is a path, a Python dataset, or a dataset for each split (`shardio.conversion.sources.datasets.Dataset`). All
    other arguments are options: `shardio convert --help` explains them.

    Raises SourceError, ConvertError, SpaceError or OSError if nothing is published. However the call ends, finished
    shards are kept, and the same call, made again, makes the remaining shards.
    """
    start = time.monotonic()
    check_local(out, ConvertError, "convert into a folder here, and copy the finished set there (docs/cluster.md)")
    folder = Path(os.path.abspath(out))
    engine = Engine(options, serial=not isinstance(src, (str, os.PathLike)))
    with bar_of(src, options.on_progress) if options.progress else nullcontext(options.on_progress) as tell:
        # All arguments are checked before SRC is scanned, which may take minutes.
        check(src, folder, options)
        if not (folder / MANIFEST_NAME).exists():
            engine.check()
        collection = collect(src, options)
        if options.scheduler is not None or (options.workers or 1) > 1:
            collection.origin.check_sendable()
        return Conversion(make_plan(folder, collection, options), engine, tell).run(start)


# Refused images that the error names; rejects.jsonl lists them all.
_MOST_NAMED = 20


class Conversion:
    """One call of `convert` after planning: makes the missing shards of its part, and publishes the set if no shard of
    any part is missing then. Not thread safe."""

    def __init__(self, plan: Plan, engine: Engine, on_progress: Callable[[Progress], None] | None) -> None:
        self._plan = plan
        self._engine = engine
        part, self._num_parts = plan.options.part or (1, 1)
        self._mine = plan.tasks[part - 1 :: self._num_parts]
        self._others = [task for n, task in enumerate(plan.tasks, 1 - part) if n % self._num_parts]
        total = sum(len(task.sources) for task in self._mine)
        most_bad = count_bad(plan.options.max_bad, plan.collection.num_sources)
        self._monitor = Monitor(total, most_bad, on_progress, tuple(describe(plan.collection)))
        self._records: dict[str, ShardRecord] = {}
        """The records of the finished tasks, by name of the shard. Complete when this call publishes the set."""
        self._missing: list[ShardTask] = []
        """The tasks of other parts that are not finished."""
        self._differing = False  # whether all of these have records, but of other sources

    def run(self, start: float) -> ConvertReport:
        """Runs the conversion and returns its report. `start` is `time.monotonic()` when `convert` was called."""
        plan, monitor = self._plan, self._monitor
        before = published(plan)
        if before is not None and (fault := FolderStorage(plan.out).find_fault(before)):
            raise FormatError(f"{plan.out}: holds this set, but it is damaged: {fault}")
        manifest = before or self._make_set()
        if manifest is not None:
            fsync_folder(plan.out)  # the process that published the set may have been killed before
            leave(plan.out, all_done=len(self._records) == len(plan.tasks))
        tasks = self._mine if manifest is None else plan.tasks
        work = report_work(plan, tasks, self._records, monitor.progress, time.monotonic() - start)
        if manifest is None:
            missing = {task.name for task in self._missing}
            parts = {number % self._num_parts + 1 for number, task in enumerate(plan.tasks) if task.name in missing}
            total, done = len(plan.tasks), len(plan.tasks) - len(missing)
            return replace(work, unfinished=UnfinishedParts(total, done, tuple(sorted(parts)), self._differing))
        return report_set(replace(work, published_before=before is not None), plan, manifest)

    def _make_set(self) -> Manifest | None:
        """Makes this part's shards. Returns the manifest if the set is published, by any process; otherwise None."""
        plan = self._plan
        try:
            with claimed(plan, lambda: self._monitor.progress.done > 0) as run_file:
                if run_file is None:
                    return published(plan)
                with turn(plan, self._monitor.report_wait):
                    if (manifest := published(plan)) is not None:
                        return manifest
                    self._make_shards(run_file)
                    # Another part may have ended since, published the set and removed the records.
                    return published(plan) if self._missing else self._publish()
        except KeyboardInterrupt as error:
            error.args = (self._describe_kept(),)
            raise
        except (TooManyBad, OSError) as error:
            # Another process may have finished the same conversion meanwhile, and removed the work folder.
            may_be_finished = isinstance(error, TooManyBad) or error.errno in (errno.ENOENT, errno.ESTALE)
            if may_be_finished and (manifest := published(plan)) is not None:
                return manifest
            if isinstance(error, TooManyBad):
                raise self._list_refused() from None
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise SpaceError(
                    f"{error.filename or plan.out}: {error.strerror}; {self._describe_kept()}: make room and run the "
                    "same command again"
                ) from error
            raise

    # --- shards -------------------------------------------------------------------------------------------------------

    def _make_shards(self, run_file: Path) -> None:
        """Finds or makes all shards of this part, and finds the finished shards of other parts."""
        records = self._find_done()
        todo = [task for task in self._mine if task.name not in records]
        self._check_space(todo)
        # Looking whether sources have changed takes time, and shards without refused images do not count here.
        self._monitor.count_others(load_records([task for task in self._others if refused_so_far(task)]).values())
        self._monitor.report_kept(records.values())
        if todo:
            self._plan.collection.origin.prepare(self._monitor.report_spooled)
        made = self._engine.run(todo, self._monitor.report, run_file)
        self._monitor.check()
        records |= {task.name: record for task, record in zip(todo, made, strict=True)}
        self._missing = without_record(self._others)
        if not self._missing:
            found = load_records(self._others)
            self._monitor.count_others(found.values())
            self._monitor.check()
            records |= found
            self._missing = [task for task in self._others if task.name not in found]
            self._differing = bool(self._missing) and not without_record(self._missing)
        self._records = records

    def _find_done(self) -> dict[str, ShardRecord]:
        """Returns the records of this part's tasks, by name of the shard, without those whose sources have changed or
        could not be read, or whose files are damaged: these are removed from OUT."""
        unrecorded = {task.name for task in without_record(self._mine)}
        found = load_records(self._mine)
        # A source that could not be read is tried again: its storage may have failed for a moment.
        records = {name: one for name, one in found.items() if UNREADABLE not in {r.reason for r in one.rejects}}
        for task in self._mine:
            if task.name not in records and task.name not in unrecorded:
                discard_record(task)
        self._discard_damaged(records)
        return records

    def _discard_damaged(self, records: dict[str, ShardRecord]) -> list[str]:
        """Removes the records of shards that have a damaged file, from OUT and from `records`, which are by name of the
        shard. Returns the names of these shards."""
        owners = {entry: name for name, record in records.items() for entry in record.files}
        out, workers = self._plan.out, count_workers(self._plan.options.workers)
        copier = FileCopier(FolderStorage(out), workers, "shardio-compare")
        damaged = {owners[entry] for entry in copier.find_damaged(out, list(owners))}
        for task in self._plan.tasks:
            if task.name in damaged:
                discard_record(task)
                del records[task.name]
        return sorted(damaged)

    def _check_space(self, todo: Sequence[ShardTask]) -> None:
        plan = self._plan
        room = sum(task.nbytes for task in todo)
        copied = plan.collection.origin.copies_nbytes() if todo else 0
        free = shutil.disk_usage(plan.out).free
        if room + copied > free:
            copies = f" and {copied:,} for copies of the images until the set is published" if copied else ""
            raise SpaceError(
                f"{plan.out}: expected room for {room:,} more bytes ({plan.nbytes:,} in all){copies}, found {free:,} "
                f"bytes free. Make room{', or choose a smaller size' if plan.options.size else ''}"
            )

    # --- the set ------------------------------------------------------------------------------------------------------

    def _publish(self) -> Manifest:
        plan, collection = self._plan, self._plan.collection
        if damaged := self._discard_damaged(
            {task.name: self._records[task.name] for task in written_since(plan.tasks)}
        ):
            raise ConvertError(
                f"{plan.out / damaged[0]}: expected the bytes that were written, found other bytes. Run the same "
                "command again to make the shard again"
            )
        records_of = {
            name: [self._records[task.name] for task in plan.tasks if task.split == name] for name in collection.splits
        }
        for name, records in records_of.items():
            if not any(len(record.rows) for record in records):
                raise ConvertError(f"{plan.out}: split {name!r}: every image was refused: mend some, or drop the split")
        splits = {name: self._publish_split(name, records) for name, records in records_of.items()}
        rejects = write_rejects(plan.out, (one for task in plan.tasks for one in self._records[task.name].rejects))
        provenance = {"conversion": plan.describe(), "libraries": library_versions()}
        if left := collection.ignored.left_out:
            provenance["left_out"] = {reason: len(keys) for reason, keys in left.items()}
        sums = np.sum([record.level_sums for record in self._records.values()], axis=0)
        if sums.any():  # else all samples to measure were refused
            provenance[LEVELS] = levels_of(first_split(splits), sums).describe()
        labels = [record.rows["label"] for record in self._records.values() if has_label(record.rows.dtype)]
        bounds = [int(bound) for found in labels if len(found) for bound in (found.min(), found.max())]
        classes = collection.classes or numbers_up_to(min(bounds, default=0), max(bounds, default=-1))
        shape, names, pixels = plan.options.sample_shape, tuple(collection.class_names), plan.options.pixels
        manifest = Manifest(shape, tuple(classes), splits, rejects, provenance, names, pixels)
        commit_manifest(plan.out, manifest)
        return manifest

    def _publish_split(self, name: str, records: Sequence[ShardRecord]) -> SplitEntry:
        """Writes the index, small arrays and checksums of the split `name`, and returns the split's manifest entry."""
        plan = self._plan
        rows = np.concatenate([record.rows for record in records])
        joined = joined_arrays(plan, rows, records)
        arrays = {}
        for spec in plan.arrays_of(name):
            if spec.row.is_small:
                writer = ArrayWriter(plan.out, name, spec.name, spec.kind, spec.row, 0)
                writer.append(joined[spec.name])
                arrays[spec.name] = writer.finish()
            else:
                files = [record.arrays[spec.name].entry for record in records if record.arrays]
                crc32s = write_crc32s(plan.out, name, spec.name, joined[spec.name])
                arrays[spec.name] = ArrayEntry(spec.kind, spec.row, tuple(filter(None, files)), crc32s)
        shards = tuple(record.entry for record in records if record.entry is not None)
        index, squashed = write_index(plan.out, name, rows), plan.options.fit == "squash"
        return SplitEntry(len(rows), index, shards, arrays=arrays, squashed=squashed)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _describe_kept(self) -> str:
        out, total = self._plan.out, self._monitor.progress.total
        undone: Sequence[ShardTask] = self._mine
        with suppress(OSError):
            undone = without_record(self._mine)
        done = total - sum(len(task.sources) for task in undone)
        return f"{done:,} of {total:,} images are kept in {out}" if done else "no image is kept yet"

    def _list_refused(self) -> ConvertError:
        """Writes the images that were refused so far to rejects.jsonl, and returns the error that names some."""
        plan, monitor, now = self._plan, self._monitor, self._monitor.progress
        rejects = [reject for task in plan.tasks for reject in refused_so_far(task)]
        write_rejects(plan.out, rejects)
        texts = (f"{os.fsdecode(reject.key)}: {reject.reason}: {reject.detail}" for reject in rejects[:_MOST_NAMED])
        named = [shortened(text, 240) for text in texts]
        if len(rejects) > _MOST_NAMED:
            named.append(f"and {len(rejects) - _MOST_NAMED:,} more")
        whose = f", {monitor.refused_by_others} of them by other parts," if monitor.refused_by_others else ""
        return ConvertError(
            f"{plan.out}: expected at most {monitor.most_bad} refused images of {plan.collection.num_sources}, found "
            f"{monitor.num_refused}{whose} after {now.done} images; nothing is published. {plan.out / REJECTS_NAME} "
            "lists the refused images: mend them and run the same command again, or allow more with --max-bad",
            *named,
        )
