"""`convert`: an image tree becomes a published shard set, or nothing does and what was done is kept.

    scan -> plan -> shard tasks -> publish

An unfinished conversion keeps its plan, the records of its finished shards and the journals of unfinished ones in
OUT/.convert. The same call goes on from there; a call with other options or other sources is refused. Tasks are done by
an engine: this machine's cores, an executor of the caller's, or a Dask cluster.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shardio.conversion.amounts import (
    DEFAULT_MAX_BAD,
    check_workers,
    given,
    most_bad,
    parse_max_bad,
    parse_nbytes,
    parse_part,
)
from shardio.conversion.duplicates import Duplicates, find_duplicates, hash_sources
from shardio.conversion.engines.dask_cluster import check_scheduler, run_on_dask
from shardio.conversion.engines.pool import Pool, run_on_pool
from shardio.conversion.engines.processes import run_tasks
from shardio.conversion.images.decode import JUNK, Colour, DecodeOptions, parse_colour
from shardio.conversion.images.fit import FitMode, Resample
from shardio.conversion.journal import find_left, sweep_unfinished
from shardio.conversion.parts import Part, Unfinished
from shardio.conversion.plan import (
    ConvertOptions,
    Order,
    Plan,
    Quality,
    ShardTask,
    difference,
    library_versions,
    make_fit,
    make_plan,
)
from shardio.conversion.sources.collection import Collection
from shardio.conversion.sources.columns import check_columns_file, read_columns
from shardio.conversion.sources.datasets import Dataset, DatasetOrigin, collect_datasets
from shardio.conversion.sources.detect import EmptyClasses, SourceKind, check_images_local, scan_for
from shardio.conversion.sources.parquet import ParquetOrigin
from shardio.conversion.task import (
    Mended,
    Report,
    ShardRecord,
    discard_record,
    load_record,
    refused_so_far,
    without_record,
)
from shardio.conversion.writing.set_writer import DEFAULT_SHARD_NBYTES, SplitContent, publish_set, read_rejects
from shardio.errors import ConvertError, FormatError, SpaceError
from shardio.format.layout import MANIFEST_NAME, REJECTS_NAME, WORK_FOLDER
from shardio.format.manifest import Manifest, load_manifest
from shardio.sets.local import PLAN_NAME, check_apart, check_free, check_local, check_usable
from shardio.system.files import (
    is_temporary,
    make_folder,
    remove_temporaries,
    sweep_temporaries,
    write_atomic,
)
from shardio.system.machine import usable_cores
from shardio.system.opening import naming, open_file, read_untrusted
from shardio.system.threads import ThreadPool

_REMOVAL_TRIES = 10
# Looking whether the sources of finished shards have changed is waiting, on a network filesystem.
_STAT_THREADS = 16


@dataclass(frozen=True)
class Progress:
    """How far a conversion, or this part of one, is, in sources."""

    done: int
    refused: int
    total: int
    spooled: int = 0
    """Copied out of parquet files, which comes before the first is done."""
    kept: int = 0
    """Of those done, what earlier calls did, and this one need not."""
    found: int = 0
    """What `kept` comes to once every shard is begun, unless some of it turns out to be changed or damaged."""


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did. If it was a part and the set is not published yet, all numbers are of this part."""

    out: str
    digest: str
    """Of the published set; "" if it is not published yet."""
    num_samples: Mapping[str, int]
    """Samples per split."""
    num_shards: int
    nbytes: int
    """Size of the published files."""
    num_sources: int
    refused: Mapping[str, int]
    """Refused sources per reason; rejects.jsonl names each."""
    source: str
    """The kind of storage that the images came from: "tree", "ilsvrc", ..., or "dataset" of one of Python."""
    mended: tuple[Mended, ...]
    """Sources that were taken although their header had to be mended; each says why."""
    ignored: Mapping[str, int]
    """What lay in SRC, or stands in the columns' file, and is no image to convert, per kind."""
    seconds: float
    num_converted: int
    """Sources that this call worked on; the others were done by an earlier one."""
    duplicates: tuple[Duplicates, ...] | None = None
    """Sources of the samples that have the same bytes; None if they were not asked for."""
    warned: tuple[Mended, ...] = ()
    """Sources that a library warned of while they were read and decoded; each says how."""
    unfinished: Unfinished | None = None
    """What other parts have still to do; None if the set is published."""

    @property
    def num_refused(self) -> int:
        return sum(self.refused.values())


def convert(
    src: str | os.PathLike[str] | Dataset | Mapping[str, Dataset],
    out: str | os.PathLike[str],
    *,
    source: SourceKind = "auto",
    accept_layout: bool = False,
    empty_classes: EmptyClasses = "refuse",
    size: int | tuple[int, int] | str = 256,
    fit: FitMode = "crop",
    resample: Resample = "bicubic",
    quality: Quality = "exact",
    shard_size: int | str = DEFAULT_SHARD_NBYTES,
    order: Order = "shuffled",
    seed: int = 0,
    exif_rotate: bool = False,
    background: Colour | str = "white",
    workers: int | None = None,
    max_bad: int | float | str = DEFAULT_MAX_BAD,
    report_duplicates: bool = False,
    columns: str | os.PathLike[str] | None = None,
    executor: Executor | None = None,
    scheduler: str | None = None,
    part: tuple[int, int] | str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> ConvertReport:
    """Convert the images in `src` into a shard set in the folder `out`.

    `src` may also be a dataset of Python, or one for each split: see `shardio.conversion.sources.datasets.Dataset`. One
    thread calls it: by default the one that calls this; with `workers`, one in each of as many processes, which have a
    copy of it.

    `source` is what the path `src` is: a folder "tree" of classes, ImageNet's archives ("ilsvrc"), the "kaggle" layout,
    a "list" file, "webdataset" tars, of which one, a folder or a pattern can be given, or "parquet" files, of which one
    or a folder can. "auto" looks and reports what it found.
    A layout that looks like a mistake, such as a single class, is refused unless `accept_layout`, or unless `out` holds
    what the same call has made or begun. A class folder without images is an error by default; `empty_classes="omit"`
    leaves the class out, so that labels number the others, and "keep" gives it a label that no sample has.
    `size` is the samples' height and width in pixels. `fit` is "crop" (short side to size, then the centre), "squash"
    or "pad" (with black). `quality="fast"` decodes a JPEG to a half, a quarter or an eighth of its size where that is
    still twice what it is resized to; such samples differ by about 50 dB PSNR. `shard_size` is the most bytes a shard
    may have. `order="shuffled"` stores the samples in an order that depends on `seed` and the sources' names alone,
    "source" as they are listed. `exif_rotate` turns pictures as their Exif orientation says, but none that a dataset
    has decoded. Transparent pixels are laid over `background`: (red, green, blue), "#rrggbb", or one of CSS's names.
    `workers` is how many cores to use, by default all. `max_bad` is how many sources may be refused, as a count (int)
    or a share (float). With `report_duplicates` the report tells which sources have the same bytes; they are converted
    as all others. `columns` is a CSV or parquet file with numbers for each source, which `read_columns` describes; they
    go into the index. `on_progress` is called in this thread. `size`, `shard_size`, `max_bad` and `part` may be
    text, too, as the command line takes them: "224x320", "4GiB", "1%", "3/16".

    `executor` does the work instead of this machine's cores: any concurrent.futures.Executor, on machines that have the
    same libraries, and `src` and `out` under the same names. It is not shut down. `scheduler` is the address of a Dask
    scheduler, for the same on its cluster. With either, `workers` is how many cores each shard is made with, by default
    one. A dataset is sent along with each shard, and called by as many threads as the executor has in a process.

    `part=(k, n)` makes only every n-th shard, from the k-th on. n such calls, on any machines and in any order, make
    the set, and the last of them publishes it; the report of the others says what is `unfinished`. `max_bad` is that of
    the whole set: beside a part's own, refused images count of the shards that others had finished before it began.

    The bytes depend on sources and options alone. If `out` holds the finished set of the same call, nothing is done.
    SourceError, ConvertError, SpaceError or OSError: nothing is published, finished shards are kept, and so is what is
    done of others, and the same call goes on. KeyboardInterrupt likewise; it says how many images are kept. A kill or a
    loss of power takes what each worker did in the last 20 seconds, and the block of 8 MiB that it was at.
    """
    start = time.monotonic()
    check_local(out, ConvertError, "convert into a folder here, and copy the finished set there (docs/cluster.md)")
    out = Path(os.path.abspath(out))
    options = ConvertOptions(
        make_fit(size, fit, resample),
        given("shard_size", shard_size, parse_nbytes),
        order,
        seed,
        DecodeOptions(exif_rotate, parse_colour(background) if isinstance(background, str) else background),
        quality,
    )
    if not isinstance(src, (str, os.PathLike)):
        _check_dataset_options(source, report_duplicates, accept_layout or empty_classes != "refuse")
    max_bad = given("max_bad", max_bad, parse_max_bad)
    most_bad(max_bad, 0)  # before anything that takes time
    engine = _choose_engine(workers, executor, scheduler, serial=not isinstance(src, (str, os.PathLike)))
    # What may be missing is found out now and not after the scan.
    if columns is not None:
        check_columns_file(Path(columns))
    if scheduler is not None and not (out / MANIFEST_NAME).exists():
        check_scheduler(scheduler)
    chosen = Part(1, 1) if part is None else Part(*given("part", part, parse_part))
    collection = _scan(src, out, source, accept_layout, empty_classes)
    elsewhere = executor is not None or scheduler is not None or (workers or 1) > 1
    if isinstance(collection.origin, DatasetOrigin) and elsewhere:
        collection.origin.check_sendable()
    table = None if columns is None else read_columns(Path(columns), collection.splits)
    plan = make_plan(out, collection, options, table, hash_sources=report_duplicates)
    mine = chosen.of(plan.tasks)
    total = sum(len(task.sources) for task in mine)
    monitor = _Monitor(total, most_bad(max_bad, collection.num_sources), on_progress)
    records: dict[str, ShardRecord] = {}
    missing: list[ShardTask] = []
    manifest = _published(plan, out)
    if manifest is None:
        try:
            with _start(out, monitor) as mark:
                manifest = _claim_folder(plan, out, mark)
                if manifest is None:
                    records, missing = _make_shards(plan, out, mine, engine, monitor)
                    if missing:
                        # Another part may have ended since, published the set and removed the records.
                        manifest = _published(plan, out)
                    else:
                        manifest = _publish(plan, out, [records[task.name] for task in plan.tasks])
        except KeyboardInterrupt as error:
            error.args = (_tell_kept(mine, out),)
            raise
        except _TooManyBad:
            manifest = _published(plan, out)
            if manifest is None:
                raise _tell_refused(plan, out, monitor) from None
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                # Another process may have finished the same conversion meanwhile, and removed the work folder.
                manifest = _published(plan, out)
            if manifest is None and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise SpaceError(
                    f"{error.filename or out}: {error.strerror}; {_tell_kept(mine, out)}: make room and run the same "
                    "command again"
                ) from error
            if manifest is None:
                raise
    if manifest is None:
        return _report_part(plan, out, chosen, records, missing, monitor, start)
    duplicates = _find_duplicates(plan, out, records, workers or usable_cores()) if report_duplicates else None
    # Whoever is still at work, say a lost machine that is not lost, shall not replace a file that is published. Without
    # the work folder nobody begins, and without its temporary file nobody ends.
    _clean_up(out, remove_temporaries if len(records) == len(plan.tasks) else sweep_temporaries)
    return ConvertReport(
        out=str(out),
        digest=manifest.digest,
        num_samples={name: split.num_samples for name, split in manifest.splits.items()},
        num_shards=sum(len(split.shards) for split in manifest.splits.values()),
        nbytes=manifest.nbytes,
        num_sources=collection.num_sources,
        refused=_count_reasons(out),
        source=collection.kind,
        mended=_noted(records.values(), mended=True),
        warned=_noted(records.values(), mended=False),
        ignored=_ignored(plan),
        seconds=time.monotonic() - start,
        num_converted=monitor.done - monitor.kept,
        duplicates=duplicates,
    )


def _noted(records: Iterable[ShardRecord], *, mended: bool) -> tuple[Mended, ...]:
    """Those of the sources that were mended, or else those that were only warned of."""
    return tuple(m for record in records for m in record.mended if m.warning.startswith(JUNK) == mended)


Engine = Callable[[Sequence[ShardTask], Report], list[ShardRecord]]
"""Does all tasks; their records in the order of the tasks. What the report raises stops the work."""


def _choose_engine(workers: int | None, executor: Executor | None, scheduler: str | None, *, serial: bool) -> Engine:
    """With `serial`, every worker has one thread, and a single one is the calling thread."""
    check_workers(workers)
    if executor is not None and scheduler is not None:
        raise ValueError("expected an executor or a scheduler, found both")
    if serial and (executor is not None or scheduler is not None) and (workers or 1) > 1:
        raise ValueError(f"a shard of a dataset is made by one thread: workers must be 1 or left out; found {workers}")
    if executor is not None:
        return lambda tasks, report: run_on_pool(tasks, Pool(executor), report, threads=workers or 1)
    if scheduler is not None:
        return lambda tasks, report: run_on_dask(tasks, scheduler, report, threads=workers or 1)
    most = workers or (1 if serial else usable_cores())
    return lambda tasks, report: run_tasks(tasks, most, report, serial=serial)


def _report_part(
    plan: Plan,
    out: Path,
    part: Part,
    records: Mapping[str, ShardRecord],
    missing: Sequence[ShardTask],
    monitor: _Monitor,
    start: float,
) -> ConvertReport:
    """What a part has done, while shards of others are missing."""
    mine = [(task.split, records[task.name]) for task in part.of(plan.tasks)]
    samples: Counter[str] = Counter()
    for split, record in mine:
        samples[split] += len(record.rows)
    shards = [record.entry for _, record in mine if record.entry is not None]
    names = {task.name for task in missing}
    return ConvertReport(
        out=str(out),
        digest="",
        num_samples=dict(samples),
        num_shards=len(shards),
        nbytes=sum(shard.nbytes for shard in shards),
        num_sources=sum(record.num_sources for _, record in mine),
        refused=dict(Counter(reject.reason for _, record in mine for reject in record.rejects).most_common()),
        mended=_noted((record for _, record in mine), mended=True),
        warned=_noted((record for _, record in mine), mended=False),
        ignored=_ignored(plan),
        seconds=time.monotonic() - start,
        num_converted=monitor.done - monitor.kept,
        source=plan.collection.kind,
        unfinished=Unfinished(
            num_shards=len(plan.tasks),
            num_finished=len(plan.tasks) - len(missing),
            parts=tuple(
                sorted({number % part.count + 1 for number, task in enumerate(plan.tasks) if task.name in names})
            ),
        ),
    )


def _check_dataset_options(source: SourceKind, report_duplicates: bool, layout: bool) -> None:
    if source != "auto":
        raise ValueError(f"source says what a path is, and `src` is a dataset: leave it out; found {source!r}")
    if layout:
        raise ValueError("accept_layout and empty_classes are about folders, and `src` is a dataset: leave them out")
    if report_duplicates:
        raise ValueError("report_duplicates compares the bytes of files, which a dataset has none of: leave it out")


def _scan(
    src: str | os.PathLike[str] | Dataset | Mapping[str, Dataset],
    out: Path,
    kind: SourceKind,
    accept_layout: bool,
    empty_classes: EmptyClasses,
) -> Collection:
    if not isinstance(src, (str, os.PathLike)):
        check_usable(out)
        return collect_datasets(src)
    check_images_local(src)
    src = Path(os.path.abspath(src))
    check_apart(src, out)
    check_usable(out)
    collection = scan_for(out, src, kind, accept_layout=accept_layout, empty_classes=empty_classes)
    if isinstance(collection.origin, ParquetOrigin):
        return replace(collection, origin=replace(collection.origin, spool=out / WORK_FOLDER))
    return collection


def _ignored(plan: Plan) -> dict[str, int]:
    unused = plan.columns.num_unused if plan.columns else 0
    return {**plan.collection.ignored, **({"row of columns without an image": unused} if unused else {})}


# --- the state of OUT ------------------------------------------------------------------------------------------------


def _published(plan: Plan, out: Path) -> Manifest | None:
    """The manifest if `out` holds the finished set of this plan, None if it holds no set; ConvertError if another."""
    if not os.path.lexists(out / MANIFEST_NAME):
        return None
    manifest = load_manifest(out)
    there = manifest.provenance.get("conversion")
    if not isinstance(there, dict):
        raise ConvertError(f"{out}: holds a published set that `convert` did not make. Convert into a new folder")
    if found := difference(there, plan.describe()):
        raise ConvertError(f"{out}: holds a finished set of another conversion ({found}). Convert into a new folder")
    return manifest


@contextlib.contextmanager
def _start(out: Path, monitor: _Monitor) -> Iterator[str]:
    """Take back what the block has made in OUT, and OUT itself, if it fails before an image is worked on.

    Yields the name of the mark by which others see, in the work folder, that this call relies on the plan there.
    """
    work = out / WORK_FOLDER
    fresh = not (work / PLAN_NAME).exists()
    absent = [folder for folder in (out, *out.parents) if not folder.exists()]
    mark = f"start.{secrets.token_hex(8)}"
    failed = True
    try:
        yield mark
        failed = False
    finally:
        with contextlib.suppress(OSError):
            (work / mark).unlink(missing_ok=True)
        if failed and fresh and not monitor.done:
            with contextlib.suppress(OSError, FormatError):  # what is left is an unfinished conversion like any other
                _take_back(out)
                for folder in absent:
                    folder.rmdir()


def _take_back(out: Path) -> None:
    """Remove the plan, unless another call relies on it, or anything is finished. OSError if OUT is not left empty."""
    work = out / WORK_FOLDER
    if not work.exists() or not all(name == PLAN_NAME or is_temporary(name) for name in os.listdir(work)):
        return
    for folder in (out, work):
        sweep_temporaries(folder)
    if os.listdir(out) == [WORK_FOLDER] and set(os.listdir(work)) <= {PLAN_NAME}:
        path = work / PLAN_NAME
        plan = read_untrusted(path) if path.exists() else None
        path.unlink(missing_ok=True)
        try:
            work.rmdir()
        except OSError:  # another call has put its mark there, and may have seen the plan
            if plan is not None:
                write_atomic(path, plan, replace=False)
            raise


def _claim_folder(plan: Plan, out: Path, mark: str) -> Manifest | None:
    """Make OUT the folder of this plan, or find that it is; ConvertError if it is anything else's.

    Returns the manifest if the same conversion was finished by another process since we looked.
    """
    work = out / WORK_FOLDER
    try:
        check_free(out)
    except ConvertError:
        if (manifest := _published(plan, out)) is not None:
            return manifest
        raise
    make_folder(out)
    while True:
        make_folder(work)
        # FileNotFoundError: another call has just taken back what it had begun.
        with contextlib.suppress(FileNotFoundError), naming(work / mark):
            open_file(work / mark, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC).close()
            break
    here = {**plan.describe(), "libraries": library_versions()}
    began = True
    try:
        write_atomic(work / PLAN_NAME, json.dumps(here).encode("ascii"), replace=False)
    except FileExistsError:
        began = False
        try:
            hint = ": remove it, or convert into a new folder"
            there = json.loads(read_untrusted(work / PLAN_NAME, refusal=ConvertError, way_out=hint))
        except (ValueError, RecursionError):
            there = None
        if changed := difference(there if isinstance(there, dict) else {}, here):
            # That may be of one who is about to find out what we find out here.
            if (manifest := _published(plan, out)) is not None:
                return manifest
            raise ConvertError(
                f"{out}: holds an unfinished conversion of another kind ({changed}). Finish that one with its own "
                "options, or remove the folder, or convert into a new one"
            ) from None
    sweep_temporaries(work)
    sweep_unfinished(out)
    # A conversion that began before ours may have been published, and its plan removed, since we looked for a set.
    try:
        return _published(plan, out)
    except ConvertError:
        if began:
            shutil.rmtree(work, ignore_errors=True)
        raise


def _clean_up(out: Path, sweep: Callable[[Path], object]) -> None:
    """Remove what the work has left beside the set: also of others that did the same work and were killed."""
    # A worker whose parent was killed may still put a file in while we remove the others.
    for _ in range(_REMOVAL_TRIES):
        with contextlib.suppress(OSError):  # the set is there, whatever remains beside it
            shutil.rmtree(out / WORK_FOLDER, ignore_errors=True)
            sweep(out)
            if not (out / WORK_FOLDER).exists():
                return


def _check_space(plan: Plan, out: Path, todo: int, spool: int) -> None:
    free = shutil.disk_usage(out).free
    if todo + spool > free:
        copies = f" and {spool:,} for copies of the images until the set is published" if spool else ""
        raise SpaceError(
            f"{out}: expected room for {todo:,} bytes more ({plan.nbytes:,} in all){copies}, found {free:,} free. Make "
            "room, or choose a smaller size"
        )


# --- the work --------------------------------------------------------------------------------------------------------


class _TooManyBad(Exception):
    pass


class _Monitor:
    """Counts sources, tells the caller, and stops the work when too many are refused."""

    def __init__(self, total: int, most_bad: int, on_progress: Callable[[Progress], None] | None) -> None:
        self.total = total
        self.most_bad = most_bad
        self.done = 0
        self.refused = 0
        self.kept = 0  # of those done: by earlier calls
        self.found = 0  # what `kept` will come to
        self.refused_by_others = 0
        self.spooled = 0
        self._on_progress = on_progress

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(Progress(self.done, self.refused, self.total, self.spooled, self.kept, self.found))

    def report_spooled(self, count: int) -> None:
        self.spooled += count
        self._tell()

    def report(self, done: int, refused: int, kept: int = 0, /) -> None:
        self.done += done
        self.refused += refused
        self.kept += kept
        self._tell()
        self._check()

    def count_others(self, records: Iterable[ShardRecord | None]) -> None:
        """Take these for all that other parts have finished."""
        self.refused_by_others = sum(len(record.rejects) for record in records if record is not None)
        self._check()

    def _check(self) -> None:
        if self.refused + self.refused_by_others > self.most_bad:
            raise _TooManyBad


def _make_shards(
    plan: Plan, out: Path, mine: Sequence[ShardTask], engine: Engine, monitor: _Monitor
) -> tuple[dict[str, ShardRecord], list[ShardTask]]:
    """The records of these tasks, found or made, by shard; and which of the others are not done.

    If all are, their records are among them.
    """
    names = {task.name for task in mine}
    others = [task for task in plan.tasks if task.name not in names]
    undone = {task.name for task in without_record(mine)}
    found = _load_records(mine)
    records = {name: record for name, record in found.items() if not record.has_unreadable}
    outdated = (names - undone | found.keys()) - records.keys()
    for task in mine:
        if task.name in outdated:
            discard_record(task)
    todo = [task for task in mine if task.name not in records]
    origin = plan.collection.origin
    spooling = origin if todo and isinstance(origin, ParquetOrigin) else None
    left = {name: found[0] for name, found in find_left(out, {task.name for task in todo}).items()}
    room = sum(task.nbytes - min(task.nbytes, left[task.name].nbytes if task.name in left else 0) for task in todo)
    _check_space(plan, out, room, spooling.missing_nbytes() if spooling else 0)
    monitor.found = sum(record.num_sources for record in records.values())
    monitor.found += sum(one.num_sources for one in left.values())
    # Looking whether sources have changed takes time, and shards without refused images do not count here.
    monitor.count_others(_load_records([task for task in others if refused_so_far(task)]).values())
    for record in records.values():
        monitor.report(record.num_sources, len(record.rejects), record.num_sources)
    if spooling:
        spooling.fill_spool(monitor.report_spooled)
    records |= {task.name: record for task, record in zip(todo, engine(todo, monitor.report), strict=True)}
    if missing := without_record(others):
        return records, missing
    found = _load_records(others)
    monitor.count_others(found.values())
    return {**records, **found}, [task for task in others if task.name not in found]


def _load_records(tasks: Sequence[ShardTask]) -> dict[str, ShardRecord]:
    """The records of those tasks that are done, by shard."""
    with ThreadPool(_STAT_THREADS, "shardio-records") as pool:
        found = zip(tasks, pool.map(load_record, tasks), strict=True)
        return {task.name: record for task, record in found if record is not None}


def _tell_kept(tasks: Sequence[ShardTask], out: Path) -> str:
    """How many images of these tasks the same call would not have to convert again."""
    try:
        undone = {task.name: task for task in without_record(tasks)}
        done = sum(len(task.sources) for task in tasks if task.name not in undone)
        done += sum(left[0].num_sources for left in find_left(out, undone).values())
    except OSError:
        done = 0
    total = sum(len(task.sources) for task in tasks)
    return f"{done:,} of {total:,} images are kept in {out}" if done else "no image is kept yet"


def _tell_refused(plan: Plan, out: Path, monitor: _Monitor) -> ConvertError:
    """Write down which images are refused so far; the error that says so."""
    write_atomic(out / REJECTS_NAME, *(line for task in plan.tasks for line in refused_so_far(task)))
    whose = f", {monitor.refused_by_others} of them by other parts," if monitor.refused_by_others else ""
    return ConvertError(
        f"{out}: expected at most {monitor.most_bad} refused images of {plan.collection.num_sources}, found "
        f"{monitor.refused + monitor.refused_by_others}{whose} after {monitor.done}; nothing is published. "
        f"{out / REJECTS_NAME} lists them so far: mend them and run the same command again, or allow more with "
        "--max-bad"
    )


def _publish(plan: Plan, out: Path, records: Sequence[ShardRecord]) -> Manifest:
    splits = {}
    for name in plan.collection.splits:
        mine = [record for task, record in zip(plan.tasks, records, strict=True) if task.split == name]
        shards = [record.entry for record in mine if record.entry is not None]
        if not shards:
            raise ConvertError(f"{out}: split {name!r}: every image was refused; nothing is published")
        rows = np.concatenate([record.rows for record in mine])
        splits[name] = SplitContent(shards, plan.columns.extend(rows) if plan.columns else rows)
    rejects = (reject for record in records for reject in record.rejects)
    provenance = {"conversion": plan.describe(), "libraries": library_versions()}
    collection = plan.collection
    classes = collection.classes or _numbers(splits.values())
    return publish_set(out, plan.options.sample_shape, classes, splits, rejects, provenance, collection.class_names)


def _numbers(splits: Iterable[SplitContent]) -> tuple[str, ...]:
    """The classes of a collection that has no names for them."""
    return tuple(map(str, range(1 + max(int(content.rows["label"].max()) for content in splits))))


def _find_duplicates(plan: Plan, out: Path, records: Mapping[str, ShardRecord], workers: int) -> tuple[Duplicates, ...]:
    """Records have no hashes if they are of a call that did not want any; a set that was finished has no records."""
    known = {name: record.hashes for name, record in records.items()}
    origin = plan.collection.origin
    if isinstance(origin, ParquetOrigin) and not all(known.get(task.name) for task in plan.tasks):
        (out / WORK_FOLDER).mkdir(exist_ok=True)
        origin.fill_spool(lambda count: None)
    hashes = b"".join(known.get(t.name) or hash_sources(t.origin, t.sources, workers) for t in plan.tasks)
    refused = {(reject.split, reject.key) for reject in read_rejects(out / REJECTS_NAME)}
    return find_duplicates([(task.split, source) for task in plan.tasks for source in task.sources], hashes, refused)


def _count_reasons(out: Path) -> dict[str, int]:
    return dict(Counter(reject.reason for reject in read_rejects(out / REJECTS_NAME)).most_common())
