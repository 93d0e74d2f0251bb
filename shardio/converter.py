"""`convert`: an image tree becomes a published shard set, or nothing does and what was finished is kept.

    scan -> plan -> shard tasks -> publish

An unfinished conversion keeps its plan and the records of its finished shards in OUT/.convert. The same call goes on
from there; a call with other options or other sources is refused.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardio.errors import ConvertError, SpaceError
from shardio.files import is_temporary, make_folder, naming, sweep_temporaries, write_atomic
from shardio.format import MANIFEST_NAME, REJECTS_NAME, WORK_FOLDER
from shardio.machine import usable_cores
from shardio.manifest import Manifest, load_manifest
from shardio.plan import ConvertOptions, Order, Plan, Quality, difference, library_versions, make_plan
from shardio.resize import Fit, FitMode, Resample
from shardio.setwriter import DEFAULT_SHARD_NBYTES, SplitContent, publish_set
from shardio.shardtask import Mended, ShardRecord, load_record, refused_so_far
from shardio.tree import scan_tree
from shardio.workers import run_tasks

_PLAN_NAME = "plan.json"
_REMOVAL_TRIES = 10
# Looking whether the sources of finished shards have changed is waiting, on a network filesystem.
_STAT_THREADS = 16


@dataclass(frozen=True)
class Progress:
    """How far a conversion is, in sources."""

    done: int
    refused: int
    total: int


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did."""

    out: str
    digest: str
    num_samples: Mapping[str, int]
    """Samples per split."""
    num_shards: int
    nbytes: int
    """Size of the published files."""
    num_sources: int
    refused: Mapping[str, int]
    """Refused sources per reason; rejects.jsonl names each."""
    mended: tuple[Mended, ...]
    """Sources that were taken although their header had to be mended."""
    ignored: Mapping[str, int]
    """What lay in the tree and is no image to convert, per kind."""
    seconds: float
    num_converted: int
    """Sources that this call worked on; the others were finished by an earlier one."""

    @property
    def num_refused(self) -> int:
        return sum(self.refused.values())


def convert(
    src: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    size: int | tuple[int, int] = 256,
    fit: FitMode = "crop",
    resample: Resample = "bicubic",
    quality: Quality = "exact",
    shard_size: int = DEFAULT_SHARD_NBYTES,
    order: Order = "shuffled",
    seed: int = 0,
    workers: int | None = None,
    max_bad: int | float = 0.01,
    on_progress: Callable[[Progress], None] | None = None,
) -> ConvertReport:
    """Convert the images of the folder tree `src` into a shard set in the folder `out`.

    `size` is the samples' height and width in pixels. `fit` is "crop" (short side to size, then the centre), "squash"
    or "pad" (with black). `quality="fast"` decodes a JPEG to a half, a quarter or an eighth of its size where that is
    still twice what it is resized to; such samples differ by about 50 dB PSNR. `shard_size` is the most bytes a shard
    may have. `order="shuffled"` stores the samples in an order that depends on `seed` and the sources' names alone,
    "source" as ImageFolder lists them. `workers` is how many cores to use, by default all. `max_bad` is how many
    sources may be refused, as a count (int) or a share (float). `on_progress` is called in this thread.

    The bytes depend on sources and options alone. If `out` holds the finished set of the same call, nothing is done.
    SourceError, ConvertError, SpaceError or OSError: nothing is published, finished shards are kept, and the same call
    goes on. KeyboardInterrupt likewise.
    """
    start = time.monotonic()
    src, out = Path(os.path.abspath(src)), Path(os.path.abspath(out))
    _check_folders(src, out)
    options = ConvertOptions(
        Fit((size, size) if isinstance(size, int) else size, fit, resample), shard_size, order, seed, quality
    )
    workers = usable_cores() if workers is None else workers
    if workers < 1:
        raise ValueError(f"workers must be at least 1; found {workers}")
    collection = scan_tree(src)
    plan = make_plan(out, collection, options)
    most_bad = _most_bad(max_bad, collection.num_sources)
    monitor = _Monitor(collection.num_sources, most_bad, on_progress)
    mended: tuple[Mended, ...] = ()
    manifest = _published(plan, out)
    if manifest is None:
        try:
            manifest = _claim_folder(plan, out)
            if manifest is None:
                records = _make_shards(plan, out, workers, monitor)
                mended = tuple(m for record in records for m in record.mended)
                manifest = _publish(plan, out, records)
        except FileNotFoundError:
            # Another process may have finished the same conversion meanwhile, and removed the work folder.
            manifest = _published(plan, out)
            if manifest is None:
                raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise SpaceError(
                    f"{error.filename or out}: {error.strerror}. Finished shards are kept: make room and run the same "
                    "command again"
                ) from error
            raise
    _clean_up(out)
    return ConvertReport(
        out=str(out),
        digest=manifest.digest,
        num_samples={name: split.num_samples for name, split in manifest.splits.items()},
        num_shards=sum(len(split.shards) for split in manifest.splits.values()),
        nbytes=manifest.nbytes,
        num_sources=collection.num_sources,
        refused=_count_reasons(out),
        mended=mended,
        ignored=dict(collection.ignored),
        seconds=time.monotonic() - start,
        num_converted=monitor.done - monitor.found,
    )


def _most_bad(max_bad: int | float, num_sources: int) -> int:
    if isinstance(max_bad, float):
        if not 0 <= max_bad <= 1:
            raise ValueError(f"max_bad as a share must be from 0.0 to 1.0; found {max_bad}")
        return int(round(max_bad * num_sources, 6))  # 0.29 * 100 is a little less than 29
    if max_bad < 0:
        raise ValueError(f"max_bad must not be negative; found {max_bad}")
    return max_bad


def _check_folders(src: Path, out: Path) -> None:
    real_src, real_out = src.resolve(), out.resolve()
    if real_src == real_out or real_src in real_out.parents or real_out in real_src.parents:
        raise ConvertError(f"{out}: expected a folder apart from the images' {src}, found one inside the other")
    if out.exists() and not out.is_dir():
        raise ConvertError(f"{out}: expected a folder or nothing, found a file")


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


def _claim_folder(plan: Plan, out: Path) -> Manifest | None:
    """Make OUT the folder of this plan, or find that it is; ConvertError if it is anything else's.

    Returns the manifest if the same conversion was finished by another process since we looked.
    """
    work = out / WORK_FOLDER
    if out.is_dir() and not (work / _PLAN_NAME).exists():
        found = sorted(name for name in os.listdir(out) if name != WORK_FOLDER and not is_temporary(name))
        if found and (manifest := _published(plan, out)) is not None:
            return manifest
        if found:
            raise ConvertError(
                f"{out}: expected no folder, an empty one or an unfinished conversion; found {found[0]!r} in it. "
                "Convert into a new folder"
            )
    make_folder(out)
    make_folder(work)
    here = {**plan.describe(), "libraries": library_versions()}
    try:
        write_atomic(work / _PLAN_NAME, json.dumps(here).encode("ascii"), replace=False)
    except FileExistsError:
        try:
            with naming(work / _PLAN_NAME):
                there = json.loads((work / _PLAN_NAME).read_bytes())
        except ValueError:
            there = {}
        if changed := difference(there, here):
            raise ConvertError(
                f"{out}: holds an unfinished conversion of another kind ({changed}). Finish that one with its own "
                "options, or remove the folder, or convert into a new one"
            ) from None
    for folder in (out, work):
        sweep_temporaries(folder)
    # A conversion that began before ours may have been published, and its plan removed, since we looked for a set.
    return _published(plan, out)


def _clean_up(out: Path) -> None:
    """Remove what the work has left beside the set: also of others that did the same work and were killed."""
    # A worker whose parent was killed may still put a file in while we remove the others.
    for _ in range(_REMOVAL_TRIES):
        with contextlib.suppress(OSError):  # the set is there, whatever remains beside it
            sweep_temporaries(out)
            shutil.rmtree(out / WORK_FOLDER, ignore_errors=True)
            if not (out / WORK_FOLDER).exists():
                return


def _check_space(plan: Plan, out: Path, todo: int) -> None:
    free = shutil.disk_usage(out).free
    if todo > free:
        raise SpaceError(
            f"{out}: expected room for {todo:,} bytes more ({plan.nbytes:,} in all), found {free:,} free. Make room, "
            "or choose a smaller size"
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
        self.found = 0  # of those done: finished by an earlier call
        self._on_progress = on_progress

    def report(self, done: int, refused: int) -> None:
        self.done += done
        self.refused += refused
        if self._on_progress is not None:
            self._on_progress(Progress(self.done, self.refused, self.total))
        if self.refused > self.most_bad:
            raise _TooManyBad


def _make_shards(plan: Plan, out: Path, workers: int, monitor: _Monitor) -> list[ShardRecord]:
    """The records of all tasks, found or made."""
    with ThreadPoolExecutor(_STAT_THREADS, thread_name_prefix="shardio-records") as pool:
        records = list(pool.map(load_record, plan.tasks))
    todo = [i for i, record in enumerate(records) if record is None]
    _check_space(plan, out, sum(plan.tasks[i].nbytes for i in todo))
    try:
        for record in filter(None, records):
            monitor.found += record.num_sources
            monitor.report(record.num_sources, len(record.rejects))
        for i, made in zip(todo, run_tasks([plan.tasks[i] for i in todo], workers, monitor.report), strict=True):
            records[i] = made
    except _TooManyBad:
        write_atomic(out / REJECTS_NAME, *map(refused_so_far, plan.tasks))
        raise ConvertError(
            f"{out}: expected at most {monitor.most_bad} refused images of {monitor.total}, found {monitor.refused} "
            f"after {monitor.done}; nothing is published. {out / REJECTS_NAME} lists them so far: mend them and run "
            "the same command again, or allow more with --max-bad"
        ) from None
    return [record for record in records if record is not None]


def _publish(plan: Plan, out: Path, records: Sequence[ShardRecord]) -> Manifest:
    splits = {}
    for name in plan.collection.splits:
        mine = [record for task, record in zip(plan.tasks, records, strict=True) if task.split == name]
        shards = [record.entry for record in mine if record.entry is not None]
        if not shards:
            raise ConvertError(f"{out}: split {name!r}: every image was refused; nothing is published")
        splits[name] = SplitContent(shards, np.concatenate([record.rows for record in mine]))
    rejects = (reject for record in records for reject in record.rejects)
    provenance = {"conversion": plan.describe(), "libraries": library_versions()}
    return publish_set(out, plan.options.sample_shape, plan.collection.classes, splits, rejects, provenance)


def _count_reasons(out: Path) -> dict[str, int]:
    with naming(out / REJECTS_NAME), (out / REJECTS_NAME).open(encoding="ascii") as lines:
        return dict(Counter(json.loads(line)["reason"] for line in lines).most_common())
