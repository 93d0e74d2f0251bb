"""`repair` makes the files of a set that `verify` finds damaged from the sources again, with the same bytes.

The tasks that made the damaged files run again in the folder of the set. A new file replaces a damaged file only if it
has the sha256 in the manifest. So a repair never makes a set worse, two repairs at the same time do no harm, and a
killed repair can be run again. A reader that has mapped a damaged file keeps the damaged file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.collect import MASK, annotate, check, readings
from shardio.conversion.engine import Engine
from shardio.conversion.options import ConvertOptions, Labels, Unlabeled, count_workers
from shardio.conversion.plan import Plan, ShardTask, difference, library_versions, make_plan
from shardio.conversion.records import ShardRecord, joined_arrays
from shardio.conversion.sources.collection import Collection
from shardio.errors import ConvertError, SourceError, first_of
from shardio.format.entries import Crc32Entry, FileEntry, ShardEntry
from shardio.format.layout import WORK_FOLDER
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import load_manifest
from shardio.sets.index import read_rows
from shardio.sets.names import hinting_at_order, local_folder
from shardio.sets.rows import crc32s_of
from shardio.sets.storage import FolderStorage
from shardio.sets.verify import verify
from shardio.system.files import fsync_folder, remove_folder, sweep_temporaries, write_atomic


@dataclass(frozen=True)
class RepairReport:
    """The outcome of a repair."""

    path: str
    repaired: tuple[str, ...]
    """Files that were damaged or missing, and are now as they were published."""


def repair(
    path: str | os.PathLike[str],
    src: str | os.PathLike[str],
    *,
    on_verify: Callable[[int, int], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    **given: Any,
) -> RepairReport:
    """Repairs the set in the folder `path`, from `src`, the images that it was converted from.

    Reads the whole set to find damaged files, and makes these files again. The manifest has the options of `convert`;
    `given` may be `source`, `table`, `masks` and `workers`. To repair a damaged index, all images of its split are
    decoded. `on_verify` is called, in any thread, with (bytes since the last call, bytes in total); `on_progress` in
    this thread with (sources done, sources in total).

    Raises ConvertError if `convert` did not make the set, if `src` lists other images now, or if a file cannot be made
    with the same bytes: such files are left as they are, and other files are repaired. Raises FormatError if the
    manifest is damaged, and SetNotFoundError if there is no manifest.
    """
    folder = Path(os.path.abspath(local_folder(path)))
    if not isinstance(src, (str, os.PathLike)):
        raise TypeError(
            f"expected the path of the images, found {type(src).__name__}. The set of a Python dataset cannot be "
            "repaired: convert the dataset again into a new folder"
        )
    options = ConvertOptions(**given)
    check(src, None, options)
    with hinting_at_order(src, "OUT, the set, comes first, and SRC, the images, second"):
        manifest = load_manifest(folder)
    plan = _plan_again(folder, manifest, src, options)
    sweep_temporaries(folder)
    fsync_folder(folder)  # a repair may have been killed before
    problems = verify(folder, workers=count_workers(options.workers), on_progress=on_verify).problems
    damaged = {problem.file for problem in problems}
    lost = _files_without_source(manifest, plan)
    work = _Repair(manifest, plan, damaged.difference(*lost.values()))
    try:
        origin = plan.collection.origin
        if work.damaged and origin.copies_nbytes():  # it reads from copies of the images
            (folder / WORK_FOLDER).mkdir(exist_ok=True)
            origin.prepare(lambda count: None)
        work.run(on_progress or (lambda done, total: None))
    finally:
        remove_folder(folder / WORK_FOLDER)
    if work.faults:
        faults = "; ".join(f"{file}: {fault}" for file, fault in work.faults.items())
        hint = ". Images were refused for their masks, too: give the masks by `--masks`" if lost["masks"] else ""
        raise ConvertError(
            f"{folder}: {len(work.faults)} files cannot be made again, and are left as they are: {faults}. Images or "
            f"libraries have changed since: the set was made with {manifest.provenance.get('libraries')}, and this "
            f"machine has {library_versions()}{hint}"
        )
    for option, files in lost.items():
        if files := files & damaged:
            raise ConvertError(
                f"{folder}: {', '.join(sorted(files))} cannot be made again without the {option} that the set was made "
                f"with: give it by `--{option}`, from Python `{option}=`"
            )
    return RepairReport(str(folder), tuple(work.repaired))


def _files_without_source(manifest: Manifest, plan: Plan) -> dict[str, set[str]]:
    """Returns {"masks": names, "table": names}: the names of the array files that can be made only with this option,
    which the caller has not given."""
    lost: dict[str, set[str]] = {"table": set(), "masks": set()}
    conversion = manifest.provenance["conversion"]
    for name, split in manifest.splits.items():
        for array in split.arrays.keys() - {spec.name for spec in plan.arrays_of(name)}:
            are_masks = array == MASK and "masks" in conversion
            if are_masks or "columns_sha256" in conversion:
                lost["masks" if are_masks else "table"].update(entry.file for entry in split.arrays[array].files)
    return lost


def _plan_again(folder: Path, manifest: Manifest, src: str | os.PathLike[str], options: ConvertOptions) -> Plan:
    """Returns the plan of the set's conversion. Raises ConvertError if `src` no longer gives the same plan."""
    there = manifest.provenance.get("conversion")
    if not isinstance(there, dict):
        change = manifest.provenance.get("change")
        if isinstance(change, dict):
            raise ConvertError(
                f"{folder}: expected a set that `convert` has made, found one that {change.get('operation')!r} made "
                "from another set: repair the other set, and make this set from it again"
            )
        raise ConvertError(f"{folder}: `convert` has not made this set, so it cannot be repaired: copy it again")
    try:
        options = options.as_described(there)
    except ValueError as error:
        raise ConvertError(f"{folder}: {error}") from None
    changes = []
    for collection in _readings(src, options):
        if (options.size is None) is collection.has_pixels:
            changes.append("images instead of arrays" if options.size is None else "arrays instead of images")
            continue
        plan = make_plan(folder, annotate(collection, options), options)
        # The names of classes are in the manifest alone, and not every kind of storage has them.
        ignored = {"class_names_sha256"}
        ignored |= set() if collection.columns else {"columns_sha256"}
        ignored |= set() if collection.tables else {"tables"}
        ignored |= {"masks"} if options.masks is None else set()
        then, now = ({k: v for k, v in made.items() if k not in ignored} for made in (there, plan.describe()))
        changes.append(difference(then, now))
        if not changes[-1]:
            return plan
    closest = min(changes, key=len)
    raise ConvertError(
        f"{folder}: cannot be made again from {src}, which holds other sources now, or was read with other tables and "
        f"columns ({closest}): pass the `--table` and columns of the conversion, if there were any"
    )


def _readings(src: str | os.PathLike[str], options: ConvertOptions) -> Iterator[Collection]:
    """Yields a collection of SRC for each choice of `labels`, `unlabeled` and `empty_classes` that `convert` may have
    had. Raises SourceError if SRC cannot be scanned with any choice."""
    ways: tuple[Labels | None, ...] = ("folders", None, "leaf", "classes", "numbers")
    for labels, unlabeled in product(ways, get_args(Unlabeled)):
        with contextlib.suppress(SourceError):
            yield from readings(src, replace(options, labels=labels, unlabeled=unlabeled), "keep", "omit")
    yield from readings(src, replace(options, labels="none"), "keep")


class _Repair:
    """One repair of the files `damaged` of the set in `plan.out`. Not thread safe."""

    def __init__(self, manifest: Manifest, plan: Plan, damaged: set[str]) -> None:
        self.manifest = manifest
        self.plan = plan
        self.damaged = damaged
        self.repaired: list[str] = []
        self.faults: dict[str, str] = {}
        """The reason why a file cannot be made again, by name of the file."""
        self._entries = {entry.file: entry for entry in manifest.files}

    def run(self, on_progress: Callable[[int, int], None]) -> None:
        """Makes all damaged files again. Calls `on_progress` with (sources done, sources in total)."""
        wanted = {file: entry.sha256 for file, entry in self._entries.items() if file in self.damaged}
        tasks = [replace(task, wanted=wanted) for task in self.plan.tasks if self._is_concerned(task)]
        done, total = 0, sum(len(task.sources) for task in tasks)

        def report(more: int, refused: int, /) -> None:
            nonlocal done
            done += more
            on_progress(done, total)

        folder = Path(tempfile.mkdtemp(prefix="shardio-"))
        try:
            records = Engine(self.plan.options).run(tasks, report, folder / "run")
        finally:  # not by a TemporaryDirectory, which calls itself for ever where nothing can be opened
            remove_folder(folder)
        crc32s_in = cache(self._published_crc32s)
        for task, record in zip(tasks, records, strict=True):
            made = {entry.file: entry for entry in record.files}
            for file in self.damaged.intersection(task.file_names):
                found = made[file].sha256 if file in made else "nothing"
                if not self._note(self._entries[file], found) and file == task.name:
                    self.faults[file] += self._changes(task, record, crc32s_in(task.split))
        for name in self.manifest.splits:
            self._make_tables(name, [record for task, record in zip(tasks, records, strict=True) if task.split == name])
        if (rejects := self.manifest.rejects) is not None and rejects.file in self.damaged:
            self._replace(rejects, (r.to_line() for record in records for r in record.rejects))
        for file in sorted(self.damaged.difference(self.repaired, self.faults)):
            self.faults[file] = "`convert` did not make it: copy it again"

    def _is_concerned(self, task: ShardTask) -> bool:
        """Whether `task` makes a damaged file, or a damaged file is made from the record of `task`."""
        split = self.manifest.splits[task.split]
        files = {split.index.file, *task.file_names}
        for spec in task.arrays:
            array = split.arrays[spec.name]
            files |= {entry.file for entry in (array.files if spec.row.is_small else [array.crc32])}
        num_samples = sum(shard.num_samples for shard in split.shards if shard.file == task.name)
        if self.manifest.rejects is not None and num_samples < len(task.sources):
            files.add(self.manifest.rejects.file)
        return not self.damaged.isdisjoint(files)

    def _published_crc32s(self, split: str) -> Mapping[bytes, int]:
        """Returns the crc32 of each published sample of a split, by key; {} if the split's index is damaged."""
        index = self.manifest.splits[split].index
        if index.file in self.damaged:
            return {}
        rows = read_rows(FolderStorage(self.plan.out), index)
        return dict(zip(rows["key"].tolist(), rows["crc32"].tolist(), strict=True))

    def _changes(self, task: ShardTask, record: ShardRecord, published: Mapping[bytes, int]) -> str:
        """Returns in words which samples of a task's new record differ from the published samples. `published` has
        their crc32s, by key; if it is empty, returns ""."""
        if not published:
            return ""
        then = {source.key: published[source.key] for source in task.sources if source.key in published}
        now = {row["key"]: row["crc32"] for row in record.rows}
        changed = sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key))
        return f" ({len(changed)} samples differ: {first_of(changed, 5, os.fsdecode)})"

    def _make_tables(self, name: str, records: Sequence[ShardRecord]) -> None:
        """Makes those of a split's index, small arrays and checksums that are damaged, from the split's `records`."""
        split = self.manifest.splits[name]
        files = {entry.file for array in split.arrays.values() for entry in array.files}
        if split.index.file in self.damaged:
            rows = np.concatenate([record.rows for record in records])
            self._replace(split.index, (split.index.header(), rows.tobytes()))
        elif not self.damaged.isdisjoint(files):
            rows = read_rows(FolderStorage(self.plan.out), split.index)
        else:
            return
        for array_name, numbers in joined_arrays(self.plan, rows, records).items():
            array = split.arrays[array_name]
            if array.row.is_small:
                self._replace_rows(array.shards[0], numbers)
                numbers = crc32s_of(numbers)
            self._replace_rows(array.crc32, numbers)

    def _replace_rows(self, entry: ShardEntry | Crc32Entry, rows: NDArray[Any]) -> None:
        if entry.file in self.damaged:
            self._replace(entry, (entry.header(), rows.astype(entry.dtype).tobytes()))

    def _replace(self, entry: FileEntry, content: Iterable[bytes | memoryview]) -> None:
        data = b"".join(content)
        if self._note(entry, hashlib.sha256(data).hexdigest()):
            write_atomic(self.plan.out / entry.file, data)

    def _note(self, entry: FileEntry, sha256: str) -> bool:
        """Returns whether a file that was made again has the published sha256: whether `sha256` is that in `entry`.
        Notes the file in `repaired` if so, and in `faults` if not."""
        if is_same := sha256 == entry.sha256:
            self.repaired.append(entry.file)
        else:
            self.faults[entry.file] = f"expected sha256 {entry.sha256}, made {sha256}"
        return is_same
