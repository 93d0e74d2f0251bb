"""`verify` checks a published set against its checksums, and names damage down to the sample.

`quick` makes the checks of opening a set. The full check reads every byte of every file. With `subset`, a part of the
samples and of the arrays' values is compared with their crc32. Files are read and not mapped, so a failing disk or a
shrinking file is a reported problem, not a fatal signal. Damage is located in stored rows, and reported as the samples
that use these rows.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError, SetNotFoundError, first_of, printable
from shardio.format.entries import (
    ArrayEntry,
    Crc32Entry,
    FileEntry,
    IndexEntry,
    OrderEntry,
    ShardEntry,
    SplitEntry,
    TableEntry,
)
from shardio.format.layout import HEADER_NBYTES, MANIFEST_NAME, RowType, crc32
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import check_digest, load_manifest
from shardio.format.opening import open_checked
from shardio.sets.index import find_outside, read_rows
from shardio.sets.names import local_folder
from shardio.sets.selection import check_share, draw_share, size_of_share
from shardio.sets.storage import FolderStorage
from shardio.system.opening import open_regular
from shardio.system.pour import pour

# More damaged samples of a file are only counted.
_MOST_NAMED = 20


@dataclass(frozen=True)
class Problem:
    """A damaged file. `samples` has the indices, within the split, of the samples that are damaged or lost."""

    file: str
    detail: str
    samples: tuple[int, ...] = ()


@dataclass(frozen=True)
class CheckedShare:
    """A random subset of samples and of arrays' values: at least the fraction `share` of each file, drawn by `seed`."""

    share: float
    seed: int
    num_samples: int = 0
    """How many samples were read, in all shards together."""
    num_values: int = 0
    """How many values of arrays were read."""


@dataclass(frozen=True)
class VerifyReport:
    path: str
    quick: bool
    num_files: int
    nbytes: int
    """The bytes read or, with `quick`, the size of all files."""
    problems: tuple[Problem, ...]
    subset: CheckedShare | None = None
    """The subset that was read; None if whole files were read."""

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(
    path: str | os.PathLike[str],
    *,
    quick: bool = False,
    subset: float | None = None,
    seed: int | None = None,
    digest: str | None = None,
    workers: int = 2,
    on_progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Checks every file of the set in the folder `path`. Returns a report with all problems found.

    - `quick`: read no pixels and no values of arrays
    - `subset`: read this fraction of the samples (more than 0, at most 1) at random, at least one per shard
    - `seed`: draw the same subset again; by default it is random, and in the report
    - `digest`: the set's digest, or its first 12 digits or more
    - `workers`: threads that read at the same time
    - `on_progress`: called in these threads with (bytes read since the last call, total bytes)

    Raises SetNotFoundError if there is no set, FormatError if the set has another digest.
    """
    if subset is None:
        if seed is not None:
            raise ValueError("`seed` only has a meaning with `subset`: give `subset` too, or no `seed`")
        drawn = None
    elif quick:
        raise ValueError("`quick` reads no samples, but `subset` does: give only one of them")
    else:
        drawn = CheckedShare(subset, secrets.randbits(32) if seed is None else seed)
        check_share("subset", drawn.share, drawn.seed)
    folder = Path(local_folder(path))
    try:
        manifest = load_manifest(folder)
    except SetNotFoundError:
        raise
    except (FormatError, OSError) as error:
        return VerifyReport(str(folder), quick, 1, 0, (_problem(folder / MANIFEST_NAME, error),), drawn)
    check_digest(folder / MANIFEST_NAME, manifest, digest)

    def progress(nbytes: int) -> None:
        if on_progress is not None:
            on_progress(nbytes, total)

    with contextlib.closing(FolderStorage(folder)) as storage:
        verifier = _Verifier(folder, storage, manifest, quick, progress, drawn)
        checks, total = verifier.checks()
        with ThreadPoolExecutor(workers, "shardio-verify") as pool:
            found = [problem for problem in pool.map(lambda check: check(), checks) if problem is not None]
    if drawn is not None:
        drawn = replace(drawn, num_samples=sum(verifier.num_compared), num_values=sum(verifier.num_values_compared))
    return VerifyReport(str(folder), quick, len(checks) + 1, total, tuple(found), drawn)


@dataclass(frozen=True)
class _Verifier:
    """The checks of a set: one check per file. They may run in any order and at the same time."""

    folder: Path
    storage: FolderStorage
    manifest: Manifest
    quick: bool
    progress: Callable[[int], None]
    subset: CheckedShare | None = None
    num_compared: list[int] = field(default_factory=list)
    """With a subset: how many samples were compared in each shard, appended by the thread that compared them."""
    num_values_compared: list[int] = field(default_factory=list)

    def checks(self) -> tuple[list[Callable[[], Problem | None]], int]:
        """Returns the checks, functions that return a Problem or None, and how many bytes they read in total."""
        rejects = self.manifest.rejects
        checks: list[Callable[[], Problem | None]] = [] if rejects is None else [partial(self.check_file, rejects)]
        every: list[_Values] = []
        for split in self.manifest.splits.values():
            of_split = [_Values(split, "", split, split.shards[0].row)] if split.shards else []
            of_split += [_Values(split, name, array, array.row) for name, array in sorted(split.arrays.items())]
            every += of_split
            num_classes = len(self.manifest.classes) if split.index.has_label else 0
            checks.append(partial(self.check_numbers, split.index, num_classes or None, "a label"))
            for number, order in enumerate(split.orders):  # it must fit the fewest rows of those that use it
                stored = {
                    each.name or "pixels": each.stored.num_rows for each in of_split if each.stored.order == number
                }
                what, fewest = min(stored.items(), key=lambda item: item[1])
                checks.append(partial(self.check_numbers, order, fewest, f"a stored row of the {what}"))
            checks += [partial(self.check_file, array.crc32) for array in split.arrays.values()]
        every.sort(key=lambda values: bool(values.name))  # pixels first, so that their draws do not depend on arrays
        total, numbers = self.manifest.nbytes, count()
        for values in every:
            sums: _Sums | None = None  # if the checksums cannot be trusted, which another check reports
            if self.subset is not None:
                with contextlib.suppress(OSError, FormatError):
                    sums = self.read_sums(values)
            starts = accumulate((shard.num_samples for shard in values.stored.shards), initial=0)
            for first, shard in zip(starts, values.stored.shards, strict=False):
                if self.subset is None:
                    checks.append(partial(self.check_shard, values, shard, first))
                    continue
                of_shard = None if sums is None else sums.of(first, shard.num_samples)
                num_rows = shard.num_samples if of_shard is None else len(np.unique(of_shard.rows))
                total += size_of_share(num_rows, self.subset.share) * values.row.nbytes - shard.nbytes
                checks.append(partial(self.check_samples, values, shard, of_shard, self.subset, next(numbers)))
        return checks, total

    def read_sums(self, values: _Values) -> _Sums:
        """Returns the checksums of all stored rows of `values`. Raises FormatError or OSError if the file with the
        checksums, or an order, is damaged."""
        split = values.split
        index: NDArray[np.void] | None = None
        try:
            index = read_rows(self.storage, split.index)
        except (FormatError, OSError):
            if values.crc32 is None:
                raise
        samples = rows = np.arange(split.num_samples)
        if values.stored.order is not None:
            order = read_rows(self.storage, split.orders[values.stored.order])
            samples = np.argsort(order, kind="stable")
            rows = order[samples]
            is_stored = (rows >= 0) & (rows < values.stored.num_rows)  # `check_numbers` reports the others
            samples, rows = samples[is_stored], rows[is_stored]
        if values.crc32 is not None:
            crc32s = read_rows(self.storage, values.crc32)
            unused = np.setdiff1d(np.arange(values.stored.num_rows), rows)
            rows, samples = np.concatenate([rows, unused]), np.concatenate([samples, np.full(len(unused), -1)])
            by_row = np.argsort(rows, kind="stable")
            rows, samples = rows[by_row], samples[by_row]
            crc32s = crc32s[rows]
        else:
            assert index is not None
            crc32s = index["crc32"][samples]
        return _Sums(rows, crc32s, samples, None if index is None else index["key"])

    def check_numbers(self, entry: IndexEntry | OrderEntry, stop: int | None, what: str) -> Problem | None:
        """Checks a file, and that its labels or stored rows are from 0 to `stop` - 1.

        Returns the problem, or None if there is none. `what` says in the problem's text what the numbers are.
        """
        problem = self.check_file(entry)
        if problem is not None or self.quick or stop is None:
            return problem
        path = self.folder / entry.file
        try:
            rows = read_rows(self.storage, entry)
        except (FormatError, OSError) as error:  # it has changed since the check just before
            return _problem(path, error)
        wrong, detail = find_outside(rows["label"] if isinstance(entry, IndexEntry) else rows, stop, what)
        return Problem(path.name, f"{path}: {detail}", tuple(wrong.tolist())) if detail else None

    def check_shard(self, values: _Values, shard: ShardEntry, first: int) -> Problem | None:
        problem = self.check_file(shard)
        path, is_bool = self.folder / shard.file, values.row.dtype == "|b1"
        if self.quick or (problem is None and not is_bool):
            return problem
        try:
            sums = self.read_sums(values).of(first, shard.num_samples)
            is_damaged = np.ones(len(sums.rows), bool)
            if os.path.lexists(path):
                with io.BufferedReader(open_regular(path)[0]) as file:
                    is_damaged, _ = _compare_rows(file, values.row, sums)
        except (OSError, FormatError):
            return problem  # no file to look into, or nothing to compare with: that is another problem's text
        if problem is None and is_damaged.any():
            problem = Problem(
                shard.file, f"{path}: expected only the bytes 0 and 1 in {values.name}, which is |b1, found others"
            )
        return None if problem is None else _described(problem, values, sums, shard, is_damaged)

    def check_samples(
        self, values: _Values, shard: ShardEntry, sums: _Sums | None, drawn: CheckedShare, number: int
    ) -> Problem | None:
        """Checks the size and header of a shard, and the crc32 of a random part of its rows.

        Returns the problem, or None if there is none. `sums` has the checksums of the shard's rows; if it is None, the
        rows are not read. `number` makes each shard's random numbers different.
        """
        path = self.folder / shard.file
        try:
            opened = open_checked(path, shard)
        except (FormatError, OSError) as error:
            return _problem(path, error)
        with io.BufferedReader(opened) as file:
            if sums is None:
                return None
            with contextlib.suppress(OSError, AttributeError):  # nothing around a sample need be read; not on macOS
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            known = np.unique(sums.rows)
            chosen = known[draw_share(len(known), drawn.share, drawn.seed, number)] if len(known) else known
            sums = sums.part(np.isin(sums.rows, chosen))
            is_damaged, failure = _compare_rows(file, values.row, sums, self.progress)
        (self.num_values_compared if values.name else self.num_compared).append(len(chosen))
        if not is_damaged.any():
            return None
        where = values.crc32.file if values.crc32 is not None else "the index"
        found = f"{path}: crc32: expected the checksums in {where}, found {int(is_damaged.sum())} that differ"
        problem = Problem(shard.file, found) if failure is None else _problem(path, failure)
        return _described(problem, values, sums, None, is_damaged)

    def check_file(self, entry: FileEntry) -> Problem | None:
        """Compares a file's size, header and sha256 with its entry. Returns the problem, or None if there is none.

        With `quick`, compares the sha256 only of indexes, orders and checksums.
        """
        path = self.folder / entry.file
        try:
            with open_checked(path, entry) as file:
                if self.quick and not isinstance(entry, TableEntry):
                    return None
                progress = None if self.quick else self.progress
                found = pour(lambda offset, buffer: file.readinto(buffer), entry.nbytes, progress=progress)
        except (FormatError, OSError) as error:
            return _problem(path, error)
        if found == entry.sha256:
            return None
        return Problem(entry.file, f"{path}: sha256: expected {entry.sha256}, found {found}")


@dataclass(frozen=True)
class _Values:
    """The stored rows of a split's pixels, where `name` is "", or of the array `name`."""

    split: SplitEntry
    name: str
    stored: SplitEntry | ArrayEntry
    row: RowType

    @property
    def crc32(self) -> Crc32Entry | None:
        """The entry of an array's checksums; None for pixels, whose checksums are in the index."""
        return self.stored.crc32 if isinstance(self.stored, ArrayEntry) else None


@dataclass(frozen=True)
class _Sums:
    """The checksums of stored rows: row `rows[i]` has the crc32 `crc32s[i]`, and holds sample `samples[i]`.

    Sorted by row. A row is listed once for each sample that uses the row. An unused row is listed with the sample -1,
    or left out if its crc32 is unknown.
    """

    rows: NDArray[np.int64]
    crc32s: NDArray[np.uint32]
    samples: NDArray[np.int64]
    keys: NDArray[np.bytes_] | None
    """The keys of all samples of the split; None if the index cannot be trusted."""

    def of(self, first: int, count: int) -> _Sums:
        """Returns the checksums of `count` rows from row `first` on, which becomes row 0 of the result."""
        part = self.part(slice(*np.searchsorted(self.rows, [first, first + count])))
        return replace(part, rows=part.rows - first)

    def part(self, chosen: slice | NDArray[np.bool_]) -> _Sums:
        return replace(self, rows=self.rows[chosen], crc32s=self.crc32s[chosen], samples=self.samples[chosen])


def _compare_rows(
    file: IO[bytes], row: RowType, sums: _Sums, progress: Callable[[int], object] = lambda nbytes: None
) -> tuple[NDArray[np.bool_], OSError | None]:
    """Returns a mask, bool (len(sums.rows),), true for damaged rows, and the last OSError of reading `file`, or None.

    A row is damaged if it has the wrong crc32, is truncated, cannot be read, or is |b1 with other bytes than 0 and 1.
    """
    damaged = np.zeros(len(sums.rows), bool)
    failure: OSError | None = None
    rows, starts = np.unique(sums.rows, return_index=True)
    bounds = [*starts.tolist(), len(damaged)]
    for stored, start, stop in zip(rows.tolist(), bounds[:-1], bounds[1:], strict=True):
        try:
            file.seek(HEADER_NBYTES + stored * row.nbytes)
            data = file.read(row.nbytes)
        except OSError as error:
            data, failure = b"", error
        is_whole = len(data) == row.nbytes and not (row.dtype == "|b1" and max(data) > 1)
        damaged[start:stop] = sums.crc32s[start:stop] != crc32(data) if is_whole else True
        progress(row.nbytes)
    return damaged, failure


def _problem(path: Path, error: FormatError | OSError) -> Problem:
    if isinstance(error, FormatError):
        return Problem(path.name, str(error))
    return Problem(path.name, f"{path}: expected a readable file, found: {error.strerror}")


def _described(
    problem: Problem, values: _Values, sums: _Sums, shard: ShardEntry | None, is_damaged: NDArray[np.bool_]
) -> Problem:
    """Returns `problem` with the damaged samples added. `is_damaged` is a mask of the rows of `sums`. `shard` is given
    if `sums` has all rows of the shard whose crc32 is known: then the text also counts the other rows."""
    samples = np.sort(sums.samples[is_damaged & (sums.samples >= 0)])
    unused = sums.rows[is_damaged & (sums.samples < 0)]
    text = ""
    if samples.size:
        text += f"; damaged samples: {_some(samples, sums.keys)}"
    if unused.size:
        text += f"; damaged rows in the file that no sample uses: {_some(unused, None)}"
    if not text:
        what = "sample agrees with its crc32 in the index"
        if values.crc32 is not None:
            what = f"value agrees with its crc32 in {values.crc32.file}"
        text = f"; every {what}"
        if shard is not None and (rest := shard.num_samples - len(np.unique(sums.rows))):
            text += f", and {rest} stored rows in it are unused and have no crc32"
    return replace(problem, detail=problem.detail + text, samples=tuple(samples.tolist()))


def _some(numbers: NDArray[np.int64], keys: NDArray[np.bytes_] | None) -> str:
    """Returns the first 20 of `numbers` as text, with their keys if `keys` is given."""

    def named(i: int) -> str:
        return f"{i}" if keys is None else f"{i} ({printable(os.fsdecode(keys[i]))})"

    return first_of(numbers.tolist(), _MOST_NAMED, named)
