"""`verify`: checks that a published set is still what was published, and names damage down to the sample.

`quick` checks what opening checks: types, sizes, headers. The full check reads every byte. Between them, a `subset` of
the samples is compared with the crc32 that the index has of each. Files are read and not mapped, so that a failing disk
or a file that shrinks is a reported problem and not a signal.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError, SetNotFoundError, printable
from shardio.format.checksum import crc32
from shardio.format.entries import FileEntry, ShardEntry, Split
from shardio.format.layout import HEADER_NBYTES, MANIFEST_NAME, sample_nbytes
from shardio.format.manifest import Manifest, load_manifest
from shardio.format.opening import open_checked
from shardio.order.permutation import Permutation
from shardio.system.opening import open_regular
from shardio.system.pour import pour
from shardio.system.threads import ThreadPool

# Damaged samples are named one by one up to so many in a file.
_MOST_NAMED = 20


@dataclass(frozen=True)
class Problem:
    """One damaged file. `samples` has the indices (in the split) of the samples that are damaged or lost."""

    file: str
    detail: str
    samples: tuple[int, ...] = ()


@dataclass(frozen=True)
class Subset:
    """The samples of each shard that are compared with the index: random ones, at least `share` of the shard's, and the
    same for the same `seed`."""

    share: float
    seed: int
    num_samples: int = 0
    """The number that was read, of all shards together."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"subset must be a share of the samples, more than 0 and at most 1; found {self.share}")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed must be from 0 to 2**64 - 1; found {self.seed}")

    def count(self, num_samples: int) -> int:
        """Returns how many samples are read of a shard of so many."""
        return math.ceil(self.share * num_samples)

    def positions(self, num_samples: int, shard: int) -> NDArray[np.int64]:
        """Returns which samples are read of the shard of this number, in ascending order, as disks like it."""
        return np.sort(Permutation(num_samples, self.seed, shard)(np.arange(self.count(num_samples))))


@dataclass(frozen=True)
class VerifyReport:
    path: str
    quick: bool
    num_files: int
    nbytes: int
    """Bytes read, or with `quick` the size of what was looked at."""
    problems: tuple[Problem, ...]
    subset: Subset | None = None
    """The samples that were compared with the index, if it was not whole files with the manifest."""

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
    """Checks every file of the set in the folder `path`. Raises SetNotFoundError if there is none.

    `quick` reads nothing but headers. `subset`, a share from above 0 to 1, reads that share of the samples, at random
    and at least one of each shard, and all files that are no shards; `seed` chooses other samples, and by default is
    random itself: the report has it. Raises ValueError if `quick` and `subset` are both given. `digest` pins the
    content: another set than the one with this digest, or these first 12 digits or more of it, is a problem of its
    manifest.

    `workers` threads read at the same time. `on_progress` is called in them, with (bytes read since, bytes in all).
    """
    if subset is None:
        if seed is not None:
            raise ValueError("seed is that of a subset, and no subset was asked for")
        drawn = None
    elif quick:
        raise ValueError("quick reads no samples, and subset some: choose one of them")
    else:
        drawn = Subset(subset, secrets.randbits(32) if seed is None else seed)
    folder = Path(path)
    try:
        manifest = load_manifest(folder, digest)
    except SetNotFoundError:
        raise
    except (FormatError, OSError) as error:
        return VerifyReport(str(folder), quick, 1, 0, (_problem(folder / MANIFEST_NAME, error),), drawn)

    def progress(nbytes: int) -> None:
        if on_progress is not None:
            on_progress(nbytes, total)

    verifier = _Verifier(folder, manifest, quick, progress, drawn)
    checks = verifier.checks()
    total = verifier.nbytes
    with ThreadPool(workers, "shardio-verify") as pool:
        found = [problem for problem in pool.map(lambda check: check(), checks) if problem is not None]
    if drawn is not None:
        drawn = replace(drawn, num_samples=sum(verifier.num_compared))
    return VerifyReport(str(folder), quick, len(checks) + 1, total, tuple(found), drawn)


@dataclass(frozen=True)
class _Verifier:
    """The checks of one set, one per file; they may run in any order and at the same time."""

    folder: Path
    manifest: Manifest
    quick: bool
    progress: Callable[[int], None]
    subset: Subset | None = None
    num_compared: list[int] = field(default_factory=list)
    """With a subset, the numbers of samples of the shards: each is appended by the thread that compared them."""

    def checks(self) -> list[Callable[[], Problem | None]]:
        checks: list[Callable[[], Problem | None]] = [partial(self.check_file, self.manifest.rejects)]
        numbers = count()
        for split in self.manifest.splits.values():
            checks.append(partial(self.check_index, split))
            starts = accumulate((shard.num_samples for shard in split.shards), initial=0)
            shards = zip(split.shards, starts, strict=False)
            if self.subset is None:
                checks += [partial(self.check_shard, split, shard, first) for shard, first in shards]
            else:
                rows = None  # if the index cannot be trusted, which `check_index` reports
                with contextlib.suppress(OSError, FormatError):
                    rows = self.read_rows(split)
                checks += [
                    partial(self.check_samples, shard, first, rows, self.subset, next(numbers))
                    for shard, first in shards
                ]
        return checks

    @property
    def nbytes(self) -> int:
        """The size of what is read, or with `quick` looked at."""
        if self.subset is None:
            return self.manifest.nbytes
        shards = [shard for split in self.manifest.splits.values() for shard in split.shards]
        num_samples = sum(self.subset.count(shard.num_samples) for shard in shards)
        others = self.manifest.nbytes - sum(shard.nbytes for shard in shards)
        return others + num_samples * sample_nbytes(self.manifest.sample_shape)

    def read_rows(self, split: Split) -> NDArray[np.void]:
        """Returns the split's index, read and not mapped. Raises FormatError or OSError if it cannot be trusted."""
        path, entry = self.folder / split.index.file, split.index
        with open_checked(path, entry, self.manifest.sample_shape) as file:
            data = file.readall()
        if (found := hashlib.sha256(data).hexdigest()) != entry.sha256:
            raise FormatError(_other_sha256(path, entry, found))
        return np.frombuffer(data, entry.dtype, offset=HEADER_NBYTES)

    def check_index(self, split: Split) -> Problem | None:
        problem = self.check_file(split.index)
        if problem is None and not self.quick and self.manifest.classes:
            path = self.folder / split.index.file
            try:
                labels = self.read_rows(split)["label"]
            except (FormatError, OSError) as error:  # it has changed since the check just before
                return _problem(path, error)
            wrong = np.flatnonzero((labels < 0) | (labels >= len(self.manifest.classes)))
            if wrong.size:
                last = len(self.manifest.classes) - 1
                detail = f"{path}: label: expected 0 to {last}, found {labels[wrong[0]]} at sample {wrong[0]}"
                return Problem(path.name, detail, tuple(wrong.tolist()))
        return problem

    def check_shard(self, split: Split, shard: ShardEntry, first: int) -> Problem | None:
        problem = self.check_file(shard)
        if problem is None or self.quick:
            return problem
        try:
            rows = self.read_rows(split)[first : first + shard.num_samples]
            damaged = [first + position for position in _damaged(self.folder / shard.file, self.manifest, rows)]
        except (OSError, FormatError):
            return problem  # no file to look into, or no index to compare with: that is another problem's text
        return Problem(problem.file, problem.detail + _describe(damaged, rows, first), tuple(damaged))

    def check_samples(
        self, shard: ShardEntry, first: int, rows: NDArray[np.void] | None, subset: Subset, number: int
    ) -> Problem | None:
        """Checks size and header of a shard, and the crc32 of some of its samples."""
        path = self.folder / shard.file
        nbytes = sample_nbytes(self.manifest.sample_shape)
        damaged: list[int] = []
        failure: OSError | None = None
        try:
            opened = open_checked(path, shard, self.manifest.sample_shape)
        except (FormatError, OSError) as error:
            return _problem(path, error)
        with io.BufferedReader(opened) as file:
            if rows is None:
                return None
            rows = rows[first : first + shard.num_samples]
            if hasattr(os, "posix_fadvise"):  # nothing around a sample need be read
                with contextlib.suppress(OSError):
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            positions = subset.positions(shard.num_samples, number).tolist()
            for position in positions:
                try:
                    file.seek(HEADER_NBYTES + position * nbytes)
                    sound = crc32(file.read(nbytes)) == rows["crc32"][position]
                except OSError as error:
                    sound, failure = False, error
                if not sound:
                    damaged.append(first + position)
                self.progress(nbytes)
        self.num_compared.append(len(positions))
        if failure is not None:
            problem = _problem(path, failure)
        elif damaged:
            problem = Problem(shard.file, f"{path}: crc32: expected those of the index, found {len(damaged)} others")
        else:
            return None
        return replace(problem, detail=problem.detail + _describe(damaged, rows, first), samples=tuple(damaged))

    def check_file(self, entry: FileEntry) -> Problem | None:
        """Compares one file with its entry."""
        path = self.folder / entry.file
        try:
            with open_checked(path, entry, self.manifest.sample_shape) as file:
                if self.quick:
                    return None
                found = pour(lambda _, buffer: file.readinto(buffer), entry.nbytes, progress=self.progress)
        except (FormatError, OSError) as error:
            return _problem(path, error)
        return None if found == entry.sha256 else Problem(entry.file, _other_sha256(path, entry, found))


def _other_sha256(path: Path, entry: FileEntry, found: str) -> str:
    return f"{path}: sha256: expected {entry.sha256}, found {found}"


def _problem(path: Path, error: FormatError | OSError) -> Problem:
    if isinstance(error, FormatError):
        return Problem(path.name, str(error))
    return Problem(path.name, f"{path}: expected a readable file, found: {error.strerror}")


def _describe(damaged: Sequence[int], rows: NDArray[np.void], first: int) -> str:
    if not damaged:
        return "; every sample agrees with its crc32 in the index"
    named = ", ".join(f"{i} ({printable(os.fsdecode(rows['key'][i - first]))})" for i in damaged[:_MOST_NAMED])
    more = f" and {len(damaged) - _MOST_NAMED} more" if len(damaged) > _MOST_NAMED else ""
    return f"; damaged samples: {named}{more}"


def _damaged(path: Path, manifest: Manifest, rows: NDArray[np.void]) -> Iterator[int]:
    """Yields the positions in the shard whose pixels do not have the crc32 of their row, or are not there."""
    nbytes = sample_nbytes(manifest.sample_shape)
    if not os.path.lexists(path):
        yield from range(len(rows))
        return
    with io.BufferedReader(open_regular(path)[0]) as file:
        file.seek(HEADER_NBYTES)
        for position, expected in enumerate(rows["crc32"].tolist()):
            pixels = file.read(nbytes)
            if len(pixels) != nbytes or crc32(pixels) != expected:
                yield position
