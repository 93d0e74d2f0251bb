"""Keeps what is done of an unfinished shard, so that a later call goes on in the middle of it.

The samples lie in the shard's temporary file. The journal lies beside the records of finished shards, and has a line
for each source that is done, in order, written when its sample is durable. No correctness rests on that: each
line has a checksum, as each sample has, and only whole ones are taken.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from collections import deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shardio.errors import FormatError
from shardio.format.layout import WORK_FOLDER
from shardio.system.files import fsync_folder, is_abandoned, is_left_over, sweep_temporaries, write_all, write_atomic
from shardio.system.opening import naming, open_untrusted, read_untrusted

_SUFFIX = ".journal"


class Stored(NamedTuple):
    """A source that became a sample, whose pixels are where they belong."""

    label: int
    source_height: int
    source_width: int
    crc32: int
    warning: str


class Refusal(NamedTuple):
    reason: str
    detail: str


@dataclass(frozen=True)
class Outcome:
    """The fate of a source."""

    result: Stored | Refusal
    hash: bytes | None = None
    """The hash of the source's bytes, if it was asked for."""


class Journal:
    """The journal of one temporary file. One thread may add while another one saves."""

    def __init__(self, temporary: Path, identity: str, fingerprints: Sequence[str]) -> None:
        """`identity` differs for any other shard that may have the same name. `fingerprints` were taken before any
        source was read, and show whether one has changed: see `Origin.fingerprints`."""
        self._out = temporary.parent
        self._path = _journal_of(temporary)
        self._identity = identity
        self._fingerprints = fingerprints
        # Written as lines when they are saved, and never in a short task.
        self._waiting: deque[Outcome] = deque()
        self._num_sources = 0
        self._num_samples = 0
        self.exists = False
        """Whether anything was saved. In a short task nothing is."""
        self.saved_at = time.monotonic()

    def read(self) -> list[Outcome]:
        """Returns the outcomes of the sources, from the first on, as far as lines are whole and sources the same."""
        try:
            lines = _whole_lines(read_untrusted(self._path))
        except (OSError, FormatError):
            return []
        outcomes: list[Outcome] = []
        # A line with the right checksum may still be of another program.
        with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
            if next(lines, None) == self._identity:
                for fingerprint, (_, found, *values) in zip(self._fingerprints, lines, strict=False):
                    if found != fingerprint:
                        break
                    outcomes.append(_to_outcome(*values))
        return outcomes

    def rewrite(self, outcomes: Sequence[Outcome]) -> None:
        """Makes the journal hold these and nothing else, as durably as `save` does."""
        write_atomic(self._path, _to_line(self._identity), *map(self._next_line, outcomes))
        fsync_folder(self._out)
        self.exists = True

    def add(self, outcome: Outcome) -> None:
        """Notes the outcome of the next source. It is in the journal when that is saved."""
        self._waiting.append(outcome)

    def _next_line(self, outcome: Outcome) -> bytes:
        number = self._num_sources
        hashed = outcome.hash and outcome.hash.hex()
        line = _to_line([number, self._fingerprints[number], hashed, *outcome.result])
        self._num_sources += 1
        self._num_samples += isinstance(outcome.result, Stored)
        return line

    def save(self, num_samples: int, *, durably: bool = True) -> bool:
        """Writes the lines of all sources before the sample `num_samples`. Returns whether there is a journal then.

        `durably` includes the name of the temporary file, without which the journal is of no use.
        """
        lines = []
        while self._waiting and self._num_samples + isinstance(self._waiting[0].result, Stored) <= num_samples:
            lines.append(self._next_line(self._waiting.popleft()))
        if not lines:
            return self.exists
        if not self.exists:
            lines.insert(0, _to_line(self._identity))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with naming(self._path), open_untrusted(self._path, flags, sole_name=True) as file:
            write_all(file.fileno(), b"".join(lines))
            if durably:
                os.fsync(file.fileno())
        if durably and not self.exists:
            for folder in (self._out, self._path.parent):
                fsync_folder(folder)
        self.exists = True
        self.saved_at = time.monotonic()
        return True

    def remove(self) -> None:
        """Removes the journal of a finished shard."""
        self._path.unlink(missing_ok=True)


def _to_outcome(hashed: str | None, *values: Any) -> Outcome:
    result = Refusal(*values) if len(values) == 2 else Stored(*values)
    if isinstance(result, Stored):
        label, *numbers, _ = result
        if not (_are_integers(-(1 << 63), 1 << 63, label) and _are_integers(0, 1 << 32, *numbers)):
            raise ValueError(f"expected numbers of a sample, found {values!r:.200}")
    return Outcome(result, bytes.fromhex(hashed) if hashed else None)


def _are_integers(start: int, stop: int, *numbers: object) -> bool:
    return all(type(number) is int and start <= number < stop for number in numbers)


def _to_line(value: object) -> bytes:
    body = json.dumps(value).encode("ascii")
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _whole_lines(data: bytes) -> Iterator[Any]:
    """Yields the identity, and the values of each source, up to the first line that is torn or not the next."""
    for number, line in enumerate(data.split(b"\n")[:-1], start=-1):
        body = line[9:]
        if line[:9] != b"%08x " % zlib.crc32(body):
            return
        value = json.loads(body)
        if number >= 0 and value[0] != number:
            return
        yield value


# --- the folder ------------------------------------------------------------------------------------------------------


class Left(NamedTuple):
    """A shard that was left unfinished."""

    temporary: Path
    num_sources: int
    """Sources that are done, as far as the journal knows."""
    nbytes: int
    """Room on the disk that need not be allocated again."""
    is_ours: bool
    """Whether its lock shows that a process of this machine has left it. Any other may still be written to, and is
    only read."""


def _journal_of(temporary: Path) -> Path:
    return temporary.parent / WORK_FOLDER / (temporary.name[1:].removesuffix(".tmp") + _SUFFIX)


def _shard_of(journal: Path) -> str:
    return journal.stem.rpartition(".")[0]


def _journals(out: Path) -> Iterator[tuple[Path, str, Path]]:
    """Yields each journal, with the name of its shard and its temporary file."""
    for name in os.listdir(out / WORK_FOLDER):
        if name.endswith(_SUFFIX):
            journal = out / WORK_FOLDER / name
            yield journal, _shard_of(journal), out / f".{journal.stem}.tmp"


def find_left(out: Path, shards: Container[str]) -> dict[str, list[Left]]:
    """Returns, for each of these shards, the files that a call can go on with, those with most sources done first."""
    found: dict[str, list[Left]] = {}
    for journal, shard, temporary in _journals(out):
        if shard not in shards or (left_over := is_left_over(temporary)) is False:
            continue
        is_ours = bool(left_over)
        with contextlib.suppress(OSError, FormatError):  # another process has just finished it, or it is no journal
            lines, nbytes = read_untrusted(journal).count(b"\n"), temporary.stat().st_blocks * 512
            found.setdefault(shard, []).append(Left(temporary, max(0, lines - 1), nbytes if is_ours else 0, is_ours))
    for left in found.values():
        left.sort(key=lambda one: one.num_sources, reverse=True)
    return found


def sweep_unfinished(out: Path) -> None:
    """Removes files that no process is writing, and no call would go on with.

    A call goes on with the one of a shard's files in which most is done. Others that were written within the last hour
    stay too: their processes may have ended since the longest was looked for.
    """
    left = find_left(out, {shard for _, shard, _ in _journals(out)})
    longest = {files[0].temporary.name for files in left.values()}

    def is_kept(name: str) -> bool:
        journal = _journal_of(out / name)
        if not journal.exists() or journal.with_name(f"{_shard_of(journal)}.json").exists():
            return False
        return name in longest or not is_abandoned(name, (out / name).stat().st_mtime, locked=False)

    sweep_temporaries(out, is_kept)
    for journal, _, temporary in _journals(out):
        if not temporary.exists():
            journal.unlink(missing_ok=True)
