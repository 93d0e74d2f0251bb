"""`verify`: is a published set still what was published? Damage is named down to the sample.

`quick` checks what opening checks: types, sizes, headers. The full check reads every byte. It reads files and does not
map them, so that a failing disk or a file that shrinks is a reported problem and not a signal.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError, SetNotFoundError
from shardio.files import open_regular
from shardio.format import HEADER_NBYTES, MANIFEST_NAME, sample_nbytes, shard_header
from shardio.manifest import FileEntry, Manifest, ShardEntry, Split, load_manifest
from shardio.shardset import open_checked, open_sized

_BLOCK_NBYTES = 4 << 20
# Damaged samples are named one by one up to so many in a file.
_MOST_NAMED = 20


@dataclass(frozen=True)
class Problem:
    """One damaged file. `samples` are the indices (in the split) of the samples that are damaged or lost."""

    file: str
    detail: str
    samples: tuple[int, ...] = ()


@dataclass(frozen=True)
class VerifyReport:
    path: str
    quick: bool
    num_files: int
    nbytes: int
    """Bytes read, or with `quick` the size of what was looked at."""
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(
    path: str | os.PathLike[str],
    *,
    quick: bool = False,
    workers: int = 2,
    on_progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check every file of the set in the folder `path`; SetNotFoundError if there is none.

    `workers` threads read at the same time. `on_progress` is called in them, with (bytes read since, bytes in all).
    """
    folder = Path(path)
    try:
        manifest = load_manifest(folder)
    except FormatError as error:
        return VerifyReport(str(folder), quick, 1, 0, (Problem(MANIFEST_NAME, str(error)),))
    except OSError as error:
        if isinstance(error, SetNotFoundError):
            raise
        problem = _unreadable(folder / MANIFEST_NAME, error)
        return VerifyReport(str(folder), quick, 1, 0, (problem,))
    total = manifest.nbytes

    def progress(nbytes: int) -> None:
        if on_progress is not None:
            on_progress(nbytes, total)

    verifier = _Verifier(folder, manifest, quick, progress)
    checks = verifier.checks()
    with ThreadPoolExecutor(workers, thread_name_prefix="shardio-verify") as pool:
        found = [problem for problem in pool.map(lambda check: check(), checks) if problem is not None]
    return VerifyReport(str(folder), quick, len(checks) + 1, total, tuple(found))


@dataclass(frozen=True)
class _Verifier:
    """The checks of one set, one per file; they may run in any order and at the same time."""

    folder: Path
    manifest: Manifest
    quick: bool
    progress: Callable[[int], None]

    def checks(self) -> list[Callable[[], Problem | None]]:
        checks: list[Callable[[], Problem | None]] = [partial(self.check_file, self.manifest.rejects, None)]
        for split in self.manifest.splits.values():
            checks.append(partial(self.check_index, split))
            starts = accumulate((shard.num_samples for shard in split.shards), initial=0)
            checks += [
                partial(self.check_shard, split, shard, first)
                for shard, first in zip(split.shards, starts, strict=False)
            ]
        return checks

    def check_index(self, split: Split) -> Problem | None:
        problem = self.check_file(split.index, split.index_header)
        if problem is None and not self.quick and self.manifest.classes:
            path = self.folder / split.index.file
            try:
                labels = _read_rows(self.folder, split)["label"]
            except OSError as error:
                return _unreadable(path, error)
            except FormatError as error:  # it has changed since the check just before
                return Problem(path.name, str(error))
            wrong = np.flatnonzero((labels < 0) | (labels >= len(self.manifest.classes)))
            if wrong.size:
                last = len(self.manifest.classes) - 1
                detail = f"{path}: label: expected 0 to {last}, found {labels[wrong[0]]} at sample {wrong[0]}"
                return Problem(path.name, detail, tuple(wrong.tolist()))
        return problem

    def check_shard(self, split: Split, shard: ShardEntry, first: int) -> Problem | None:
        problem = self.check_file(shard, shard_header(shard.num_samples, self.manifest.sample_shape))
        if problem is None or self.quick:
            return problem
        try:
            rows = _read_rows(self.folder, split)[first : first + shard.num_samples]
            damaged = [first + position for position in _damaged(self.folder / shard.file, self.manifest, rows)]
        except (OSError, FormatError):
            return problem  # no file to look into, or no index to compare with: that is another problem's text
        return Problem(problem.file, problem.detail + _describe(damaged, rows, first), tuple(damaged))

    def check_file(self, entry: FileEntry, header: bytes | None) -> Problem | None:
        """One file against its entry. Files without a fixed header (rejects) are checked by size and checksum alone."""
        path = self.folder / entry.file
        try:
            descriptor = open_sized(path, entry) if header is None else open_checked(path, entry, header)
            with os.fdopen(descriptor, "rb", buffering=0) as file:
                if self.quick:
                    return None
                sha256 = hashlib.sha256()
                block = bytearray(_BLOCK_NBYTES)
                while count := file.readinto(block):
                    sha256.update(memoryview(block)[:count])
                    self.progress(count)
        except FormatError as error:
            return Problem(entry.file, str(error))
        except OSError as error:
            return _unreadable(path, error)
        if sha256.hexdigest() != entry.sha256:
            return Problem(entry.file, f"{path}: sha256: expected {entry.sha256}, found {sha256.hexdigest()}")
        return None


def _unreadable(path: Path, error: OSError) -> Problem:
    return Problem(path.name, f"{path}: expected a readable file, found: {error.strerror}")


def _describe(damaged: Sequence[int], rows: NDArray[np.void], first: int) -> str:
    if not damaged:
        return "; every sample agrees with its crc32 in the index"
    named = ", ".join(f"{i} ({os.fsdecode(rows['key'][i - first])})" for i in damaged[:_MOST_NAMED])
    more = f" and {len(damaged) - _MOST_NAMED} more" if len(damaged) > _MOST_NAMED else ""
    return f"; damaged samples: {named}{more}"


def _read_rows(folder: Path, split: Split) -> NDArray[np.void]:
    """The split's index, read and not mapped. FormatError or OSError if it cannot be trusted."""
    descriptor = open_checked(folder / split.index.file, split.index, split.index_header)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read()
    found = hashlib.sha256(data).hexdigest()
    if found != split.index.sha256:
        raise FormatError(f"{folder / split.index.file}: sha256: expected {split.index.sha256}, found {found}")
    return np.frombuffer(data, split.index.dtype, offset=HEADER_NBYTES)


def _damaged(path: Path, manifest: Manifest, rows: NDArray[np.void]) -> Iterator[int]:
    """Positions in the shard whose pixels do not have the crc32 of their row, or are not there."""
    nbytes = sample_nbytes(manifest.sample_shape)
    if not os.path.lexists(path):
        yield from range(len(rows))
        return
    descriptor, _ = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        file.seek(HEADER_NBYTES)
        for position, crc32 in enumerate(rows["crc32"].tolist()):
            pixels = file.read(nbytes)
            if len(pixels) != nbytes or zlib.crc32(pixels) != crc32:
                yield position
