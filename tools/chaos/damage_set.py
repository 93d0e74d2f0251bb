#!/usr/bin/env python
"""Damages a published set in every way that comes to mind: `verify` must find each damage and name it.

    python tools/chaos/damage_set.py [--damages 100000] [--rounds 100] [--seed 0] [--processes N]

In a small set of two splits, one of which has arrays and an order of its stored rows, bytes of any file are changed or
zeroed, from one bit to 64 kB, files are cut off or grow, two shards change places, a shard or an index of another set
is put in the place of one, and a file is replaced by a link to a sound copy, a folder, a FIFO or nothing. Each time
`verify` must report exactly the files that differ, by their paths, and exactly the samples of shards that differ.
Opening must refuse everything that it checks: every file that has another size, type or header, every index, order or
file of checksums that has another byte, and any manifest that says something else. When a bit flips in a label, another
number of the index, an order or a checksum, loaders of every `io` must refuse to give a batch, and commands must refuse
to show samples. All that happens in processes which must not die, by a signal or otherwise, nor wait for ever. Then the
old bytes are written back.

Rounds of training: a row of a shard rots in the source, in a copy in a cache, or in another copy that shares the file,
before, while or after the copy is made, and a loader of any options reads four epochs. Meanwhile `stage` may find the
damage. No wrong sample may be delivered in an epoch that begins after its file was found damaged, nor from a file
that is not verified yet. Only damage of the source may be an error, which names the sample; and in the end the copy is
sound, or lacks the damaged file.

Exit code 1 if anything was otherwise. Linux only.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, get_args

import attack
import numpy as np
from attack import Lane, Say, Tell, listen, make_parser, never_sync, verdict
from click.testing import CliRunner
from numpy.typing import NDArray

from shardio.augment.transforms import CenterCrop
from shardio.cache import cached_split, filler, partial_copy
from shardio.cache.stage import stage
from shardio.changes.change import change
from shardio.cli.main import cli
from shardio.conversion.records import Reject, write_rejects
from shardio.conversion.writing.shard_file import IndexRows, ShardFileWriter
from shardio.errors import FormatError, SetNotFoundError
from shardio.format.entries import ArrayEntry, FileEntry, SplitEntry
from shardio.format.layout import (
    HEADER_NBYTES,
    MANIFEST_NAME,
    REJECTS_NAME,
    ArrayKind,
    RowType,
    SampleShape,
    array_crc32_name,
    array_shard_name,
    index_name,
    order_name,
    pixels_row,
    shard_name,
)
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import commit_manifest
from shardio.loading.loader import ShardLoader
from shardio.reading.choose import Io
from shardio.reading.shardset import open_shards
from shardio.sets.rows import ArrayWriter, write_index, write_order
from shardio.sets.storage import FolderStorage
from shardio.sets.verify import verify
from shardio.system.machine import usable_cores

SHAPES: dict[str, SampleShape] = {"rgb": (32, 32, 3), "yuv420": (32, 64, 3)}
"""Of samples, by how they are stored: in rows of equally many bytes."""
ROW_NBYTES = 32 * 32 * 3
NUM_SAMPLES = {"train": (24, 24, 9), "val": (24, 7)}
"""Stored rows of each shard. Some shards are equally large, so that sizes do not tell them apart."""
NUM_STORED = sum(NUM_SAMPLES["val"])
ORDER = np.array([*range(30, 9, -1), 12, 12, 3, 30])
"""Of the samples of val. Some of its rows are of several samples, and some of none."""
ARRAYS: dict[str, tuple[ArrayKind, RowType]] = {
    "mask": ("mask", RowType("|u1", (32, 32))),
    "flags": ("array", RowType("|b1", (40,))),
    "clip": ("array", RowType("<f2", (64,))),
    "year": ("array", RowType("<i8", ())),
}
ORDERED = ("mask", "flags")
ARRAY_ROWS = 11
"""Rows of each shard of an array but the last."""
MOST_NBYTES = 64 << 10
# Seconds for one damage, which takes milliseconds.
PATIENCE_SECONDS = 60
# After so many damages a process ends and another one goes on.
BATCH = 1000
PLACES, MOMENTS = ("source", "copy", "sibling"), ("before", "during", "after")
"""Where a file rots, and when: before, while or after the copy of the set is made."""
NOT_MENDED = 3
"""Exit code of a process that leaves a set which is not what it was."""

LINK, FOLDER, FIFO, NOTHING = "a link", "a folder", "a FIFO", "nothing"
Content = bytes | str
"""The bytes of a file, or what is there instead of it."""
Contents = dict[str, bytes]
"""The bytes of each file of a set."""


# --- sound sets ------------------------------------------------------------------------------------------------------


def write_set(folder: Path, seed: int, pixels: str = "rgb") -> Contents:
    """Publishes a set of random pixels, and returns its contents."""
    folder.mkdir()
    pixels_type = pixels_row(SHAPES[pixels], pixels)
    rng = np.random.default_rng(seed)
    splits, indexes = {}, {}
    for split, counts in NUM_SAMPLES.items():
        entries, rows = [], IndexRows()
        for number, count in enumerate(counts):
            with ShardFileWriter(folder / shard_name(split, number), pixels_type, count) as shard:
                for i in range(count):
                    label, key = int(rng.integers(3)), f"{split}/{number}-{i}.png".encode()
                    stored = rng.integers(0, 256, pixels_type.shape, dtype=np.uint8)
                    rows.append(label=label, key=key, source_size=(99, 99), crc32=shard.append(stored))
                entries.append(shard.finish())
        indexes[split] = rows.to_array(20, has_label=True)
        splits[split] = SplitEntry(len(rows), write_index(folder, split, indexes[split]), tuple(entries))
    rejects = [Reject("train", b"train/x.JPEG", "damaged", "cut short")]
    manifest = Manifest(SHAPES[pixels], ("a", "b", "c"), splits, write_rejects(folder, rejects), pixels=pixels)
    kinds: dict[ArrayKind, ArrayKind] = {} if pixels == "rgb" else {"mask": "array"}
    arrays = {
        name: replace(_write_array(folder, name, kinds.get(kind, kind), row, rng), order=0 if name in ORDERED else None)
        for name, (kind, row) in ARRAYS.items()
    }
    val = replace(
        splits["val"],
        num_samples=len(ORDER),
        index=write_index(folder, "val", indexes["val"][ORDER]),
        orders=(write_order(folder, "val", 0, ORDER if seed == 1 else ORDER[::-1]),),
        order=0,
        arrays=arrays,
    )
    commit_manifest(folder, replace(manifest, splits={**splits, "val": val}))
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _write_array(folder: Path, name: str, kind: ArrayKind, row: RowType, rng: np.random.Generator) -> ArrayEntry:
    num_rows = NUM_STORED if name in ORDERED else len(ORDER)
    values = rng.integers(0, 2 if row.dtype == "|b1" else 256, num_rows * row.nbytes, dtype=np.uint8)
    writer = ArrayWriter(folder, "val", name, kind, row, HEADER_NBYTES + ARRAY_ROWS * row.nbytes)
    writer.append(values.view(row.dtype).reshape(num_rows, *row.shape))
    return writer.finish()


def _users(num_rows: int, order: NDArray[np.int64] | None) -> list[tuple[int, ...]]:
    """Returns the samples that use each stored row."""
    if order is None:
        return [(row,) for row in range(num_rows)]
    return [tuple(np.flatnonzero(order == row).tolist()) for row in range(num_rows)]


def _shards() -> dict[str, tuple[int, list[tuple[int, ...]]]]:
    shards: dict[str, tuple[int, list[tuple[int, ...]]]] = {}
    for split, counts in NUM_SAMPLES.items():
        users = _users(sum(counts), ORDER if split == "val" else None)
        for number, count in enumerate(counts):
            first = sum(counts[:number])
            shards[shard_name(split, number)] = ROW_NBYTES, users[first : first + count]
    for name, (_, row) in ARRAYS.items():
        users = _users(NUM_STORED, ORDER) if name in ORDERED else _users(len(ORDER), None)
        step = len(users) if row.is_small else ARRAY_ROWS
        for number, first in enumerate(range(0, len(users), step)):
            file = array_shard_name("val", name, None if row.is_small else number)
            shards[file] = row.nbytes, users[first : first + step]
    return shards


SHARDS = _shards()
"""The bytes of a row of each shard, of pixels or of an array, and the samples of each of its rows."""
INDEXES = {index_name(split): split for split in NUM_SAMPLES}
CHECKSUMS = [array_crc32_name("val", name) for name in ARRAYS]
TABLES = [*INDEXES, order_name("val", 0), *CHECKSUMS]
"""What is compared with its sha256 at every opening."""
COMMANDS = {
    "extract": ["--indices", "0", "--output", "{new}"],
    "replay": ["--batch-size", "4", "--shuffle", "false"],
    "report": ["--output", "{new}"],
    "view": ["--output", "{new}.png"],
}


# --- damages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    """New contents of the files that differ from the sound set."""

    kind: str
    changed: Mapping[str, Content]

    def __str__(self) -> str:
        return f"{self.kind} ({', '.join(self.changed)})"


def _span(rng: np.random.Generator, data: bytes) -> slice:
    """Draws a span of a few or many bytes, with the same probability. Some begin in the header, which has nothing to do
    with pixels and is read first."""
    start = int(rng.integers(len(data) if rng.random() < 0.9 else min(len(data), HEADER_NBYTES)))
    return slice(start, start + int(2 ** rng.uniform(0, np.log2(MOST_NBYTES))))


def _flip_a_bit(rng: np.random.Generator, data: bytes) -> bytes:
    changed = bytearray(data)
    changed[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def _change(rng: np.random.Generator, data: bytes) -> bytes:
    changed, span = np.frombuffer(data, np.uint8).copy(), _span(rng, data)
    changed[span] ^= rng.integers(1, 256, len(changed[span]), dtype=np.uint8)
    return changed.tobytes()


def _zero(rng: np.random.Generator, data: bytes) -> bytes:
    changed = np.frombuffer(data, np.uint8).copy()
    changed[_span(rng, data)] = 0
    return changed.tobytes()


def _cut(rng: np.random.Generator, data: bytes) -> bytes:
    """Cuts off anywhere, or behind a whole sample, a page or a single byte less."""
    sizes = [
        0,
        1,
        HEADER_NBYTES,
        HEADER_NBYTES + ROW_NBYTES * int(rng.integers(24)),
        len(data) // 4096 * 4096,
        len(data) - 1,
    ]
    size = int(rng.choice(sizes)) if rng.random() < 0.5 else int(rng.integers(len(data)))
    return data[:size]


def _grow(rng: np.random.Generator, data: bytes) -> bytes:
    count = int(2 ** rng.uniform(0, np.log2(MOST_NBYTES)))
    return data + (bytes(count) if rng.random() < 0.5 else rng.bytes(count))


_CHANGES = {
    "one bit flipped": _flip_a_bit,
    "bytes changed": _change,
    "bytes zeroed": _zero,
    "cut off": _cut,
    "grown": _grow,
}
NUMBER = "a number of a table"
KINDS = (
    *(NUMBER, NUMBER),
    *("one bit flipped", "bytes changed", "bytes changed", "bytes zeroed", "bytes zeroed", "cut off", "cut off"),
    *("grown", "two shards swapped", "a shard of another set", "an index of another set"),
    *("a link", "a folder", "a FIFO", "nothing"),
)


def draw(rng: np.random.Generator, sound: Contents, other: Contents) -> Damage:
    """Draws damage of a random kind that does change something."""
    kind = KINDS[rng.integers(len(KINDS))]
    while True:
        changed = _draw(rng, kind, sound, other)
        if all(_differs(name, sound[name], content) for name, content in changed.items()):
            return Damage(kind, changed)


def _draw(rng: np.random.Generator, kind: str, sound: Contents, other: Contents) -> dict[str, Content]:
    if kind == "two shards swapped":
        one, two = rng.choice(list(SHARDS), 2, replace=False).tolist()
        return {one: sound[two], two: sound[one]}
    if kind == "a shard of another set":
        return {(name := str(rng.choice(list(SHARDS)))): other[name]}
    if kind == "an index of another set":
        return {(name := str(rng.choice(list(INDEXES)))): other[name]}
    if kind == NUMBER:
        name = str(rng.choice(TABLES))
        return {name: sound[name][:HEADER_NBYTES] + _flip_a_bit(rng, sound[name][HEADER_NBYTES:])}
    # Most of a set is shards.
    name = str(rng.choice(list(SHARDS) if rng.random() < 0.6 else list(sound)))
    return {name: _CHANGES[kind](rng, sound[name]) if kind in _CHANGES else kind}


def _differs(name: str, was: bytes, now: Content) -> bool:
    if name == MANIFEST_NAME and isinstance(now, bytes):  # other white space is no other manifest
        try:
            return bool(json.loads(now) != json.loads(was))
        except ValueError:
            return True
    return was != now


def expected_samples(name: str, was: bytes, now: Content) -> tuple[int, ...]:
    """Returns the samples that `verify` must name, by comparing bytes."""
    if name not in SHARDS or now in (LINK, FOLDER, FIFO):
        return ()
    nbytes, users = SHARDS[name]
    data = b"" if isinstance(now, str) else now
    spans = [slice(HEADER_NBYTES + p * nbytes, HEADER_NBYTES + (p + 1) * nbytes) for p in range(len(users))]
    return tuple(sorted(i for span, of in zip(spans, users, strict=True) for i in of if data[span] != was[span]))


def is_seen_at_open(name: str, was: bytes, now: Content) -> bool:
    """Tells whether opening the split of this file must fail."""
    if name == REJECTS_NAME:
        return False
    if name in (MANIFEST_NAME, *TABLES) or isinstance(now, str):
        return True
    return len(now) != len(was) or now[:HEADER_NBYTES] != was[:HEADER_NBYTES]


def open_all(folder: Path, split: str) -> None:
    """Opens a split, and each of its arrays, as a job does that asks for all of them."""
    shards = open_shards(folder, split)
    for name in shards.arrays:
        shards.mapped(name)
        shards.copy_crc32s(name, np.array([], np.int64))


def train_on(io: Io, folder: Path, split: str) -> None:
    """Reads a batch as a job does that wants to know of damage."""
    arrays = list(ARRAYS) if split == "val" else []
    with ShardLoader(folder, 1, split=split, io=io, check="sample", arrays=arrays, rank=0, world_size=1) as loader:
        next(iter(loader))


def show(command: str, folder: Path, split: str) -> None:
    """Runs a command that shows samples."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as new:
        options = [option.format(new=f"{new}/new") for option in COMMANDS[command]]
        options += [] if command == "report" else ["--split", split]
        result = CliRunner().invoke(cli, [command, str(folder), *options])
    if result.exception is not None:
        raise result.exception


# --- judging ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """A set to be damaged, what it holds when it is sound, and another set of the same sizes."""

    folder: Path
    sound: Contents
    other: Contents

    @property
    def copies(self) -> Path:
        """Sound files for links to lead to."""
        return self.folder.with_name("copies")

    def put(self, name: str, content: Content) -> None:
        path = self.folder / name
        if content == LINK:
            path.unlink()
            path.symlink_to(self.copies / name)
        elif content == FOLDER:
            path.unlink()
            path.mkdir()
        elif content == FIFO:
            path.unlink()
            os.mkfifo(path)
        elif content == NOTHING:
            path.unlink()
        else:
            assert isinstance(content, bytes)
            path.write_bytes(content)

    def mend(self, name: str) -> None:
        path = self.folder / name
        if path.is_dir():
            path.rmdir()
        elif path.is_symlink() or not path.is_file():
            path.unlink(missing_ok=True)
        path.write_bytes(self.sound[name])

    def draw(self, seed: int, number: int) -> Damage:
        return draw(np.random.default_rng([seed, number]), self.sound, self.other)

    def try_damage(self, damage: Damage) -> str:
        """Does the damage, judges what is said of it, and undoes it. Returns what is wrong, or ""."""
        try:
            for name, content in damage.changed.items():
                self.put(name, content)
            return self.judge(damage)
        finally:
            for name in damage.changed:
                self.mend(name)

    def judge(self, damage: Damage) -> str:
        try:
            problems = verify(self.folder, workers=1).problems
        except SetNotFoundError as error:
            without = damage.changed == {MANIFEST_NAME: NOTHING} and str(self.folder / MANIFEST_NAME) in str(error)
            return "" if without else f"expected a set, found {error}"
        found = {problem.file: problem.samples for problem in problems}
        expected = {name: expected_samples(name, self.sound[name], now) for name, now in damage.changed.items()}
        if found != expected:
            return f"expected the samples of {expected} to be named, found {found}"
        for problem in problems:
            if not problem.detail.startswith(f"{self.folder / problem.file}: "):
                return f"expected the path in {problem.detail!r}"
        seen = self.seen_at_open(damage)
        for split in NUM_SAMPLES:
            refused = [n for n in seen if n.startswith((f"{split}-", MANIFEST_NAME))]
            if wrong := self._opening(open_all, split, refused):
                return wrong
            if damage.kind == NUMBER and refused:
                uses = [partial(train_on, io) for io in get_args(Io)]
                if refused[0] not in CHECKSUMS:  # which these commands have no use for
                    uses += [partial(show, command) for command in COMMANDS]
                for use in uses:
                    if wrong := self._opening(use, split, refused):
                        return f"{use.args[0]}: {wrong}"
        return ""

    def seen_at_open(self, damage: Damage) -> list[str]:
        """Returns the files for which opening must fail."""
        return [name for name, now in damage.changed.items() if is_seen_at_open(name, self.sound[name], now)]

    def _opening(self, use: Callable[[Path, str], None], split: str, refused: Sequence[str]) -> str:
        try:
            use(self.folder, split)
        except (FormatError, SetNotFoundError) as error:
            if not any(str(self.folder / name) in str(error) for name in refused):
                return f"expected {split} to be refused for {refused or 'nothing'}, found {error}"
            return ""
        return f"expected {split} to be refused for {refused}, but it was opened" if refused else ""


# --- rot while a loader reads -----------------------------------------------------------------------------------------


class SlowFolder(FolderStorage):
    def read_into(self, entry: FileEntry, offset: int, buffer: memoryview) -> None:
        time.sleep(0.002)
        super().read_into(entry, offset, buffer)


class RottenTraining:
    """A round of training on a set, of which a file rots at a random place and moment."""

    def __init__(self, folder: Path, rng: np.random.Generator) -> None:
        self.site = _make_site(folder, str(rng.choice(list(SHAPES))))
        self.sibling, self.rng = folder / "sibling", rng
        change(self.site.folder, self.sibling, split="val", arrays={"extra": np.arange(len(ORDER))})
        self.place, self.moment = str(rng.choice(PLACES)), str(rng.choice(MOMENTS))
        self.split = str(rng.choice(list(NUM_SAMPLES)))
        self.name = str(rng.choice([name for name in SHARDS if name.startswith(self.split)]))
        self.cache = folder / "cache" if self.place != "source" or rng.random() < 0.7 else None
        self.crops = self.split == "train" and rng.random() < 0.5
        options = {"arrays": list(ARRAYS)} if self.split == "val" else {}
        transform = CenterCrop(8) if self.crops else None
        self.options: dict[str, Any] = {"split": self.split, "transform": transform, "rank": 0, "world_size": 1}
        self.options |= {"tail": "short", "return_indices": True, **options}
        with ShardLoader(self.site.copies, 1, **self.options) as loader:
            self.truth = {int(batch[2]): _bytes_of(batch)[0] for batch in loader}
        self.check: Any = str(rng.choice(["off", "sample"]))
        self.io: Any = str(rng.choice(["auto", "mmap", "pread"]))
        self.said: list[str] = []

    def __str__(self) -> str:
        cached = "with" if self.cache else "without"
        return f"{self.name} rots in the {self.place} {self.moment}, {cached} a cache, {self.check}, {self.io}"

    def rot(self) -> None:
        """Changes bytes of the file, as a failing disk does."""
        digest = open_shards(self.sibling if self.place == "sibling" else self.site.copies, self.split).digest
        folder = self.site.folder if self.cache is None or self.place == "source" else self.cache / digest
        nbytes, users = SHARDS[self.name]
        row = int(self.rng.choice([row for row, samples in enumerate(users) if samples]))
        for path in (folder / self.name, folder / f".{self.name}.part"):
            with contextlib.suppress(FileNotFoundError):  # it gets its name just now
                status = path.stat()
                with path.open("r+b") as file:
                    file.seek(HEADER_NBYTES + row * nbytes)
                    data = file.read(nbytes)
                    file.seek(HEADER_NBYTES + row * nbytes)
                    file.write(bytes(255 - byte for byte in data[:9]) + data[9:])
                if self.rng.random() < 0.7:  # a disk tells nobody
                    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
                return

    def find(self) -> None:
        """Stages the set or its sibling, which may find the damage."""
        kind = self.rng.integers(3)
        if self.cache is not None and kind:
            try:
                stage([self.site.folder, self.sibling][kind - 1], self.cache, verify=True, on_message=self.said.append)
            except FormatError as error:
                self.said.append(str(error))

    def run(self) -> list[str]:
        """Returns what is wrong."""
        if self.cache and self.place == "sibling":
            stage(self.sibling, self.cache)
        if self.cache and (self.moment == "after" or (self.place, self.moment) == ("copy", "before")):
            stage(self.site.folder, self.cache)
        if self.moment == "before":
            self.rot()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with ShardLoader(
                self.site.folder, 4, cache=self.cache, check=self.check, io=self.io, **self.options
            ) as loader:
                rotting = threading.Timer(self.rng.random() * 0.1, self.rot)
                if self.moment != "before":
                    rotting.start()
                wrong = [text for epoch in range(4) for text in self.epoch(loader, epoch, caught)]
                rotting.cancel()
        return wrong + self.end()

    def epoch(self, loader: ShardLoader, epoch: int, caught: Sequence[warnings.WarningMessage]) -> list[str]:
        found = [text for text in (*self.said, *(str(one.message) for one in caught)) if self.name in text]
        # Rows of a file without its name are compared. Only crops are not, before there are unfinished files.
        never = self.check == "sample" or (self.place, self.moment) == ("sibling", "before")
        never |= self.place == "source" and self.cache is not None and not self.crops
        wrong = 0
        try:
            for batch in loader:
                for index, data in zip(batch[2].tolist(), _bytes_of(batch), strict=True):
                    wrong += data != self.truth[index]
        except FormatError as error:
            told = str(error)
            samples = expected_samples(
                self.name, self.site.sound[self.name], (self.site.folder / self.name).read_bytes()
            )
            named = any(f"sample {i} " in told and "`shardio repair`" in told and "`indices=`" in told for i in samples)
            # Without a cache, a file that was written to is hashed when it is opened again.
            if not named and not (self.cache is None and f"{self.name}: sha256: " in told):
                return [f"epoch {epoch}: {told}"]
        if epoch == 1:
            self.find()
        return [f"epoch {epoch}: {wrong} wrong samples, found: {found}"] if wrong and (found or never) else []

    def end(self) -> list[str]:
        if self.cache is None:
            return []
        copy = self.cache / open_shards(self.site.copies, self.split).digest
        if self.place != "source":
            stage(self.site.folder, self.cache, verify=True)
            return [] if verify(copy).ok else ["the copy was not mended"]
        is_sound = not (copy / self.name).exists() or (copy / self.name).read_bytes() == self.site.sound[self.name]
        return [] if is_sound else ["a damaged file has its name in the copy"]


def _bytes_of(batch: Any) -> list[bytes]:
    """Returns the bytes of each sample of a batch, with all its parts."""
    parts = [part for some in batch for part in (some.values() if isinstance(some, dict) else [some])]
    return [b"".join(part[i].numpy().tobytes() for part in parts) for i in range(len(parts[0]))]


def _train_some(folder: Path, seed: int, numbers: range, tell: Tell) -> int:
    patched: Any = (cached_split, filler, partial_copy)  # so that files are received in many pieces, slowly
    patched[0].open_storage, patched[1]._REQUESTS, patched[1]._SHARED_REQUESTS = SlowFolder, (1, 4096), (2, 4096)
    patched[2]._LEAST_NBYTES = 1
    never_sync()
    for number in numbers:
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECONDS)
        with tempfile.TemporaryDirectory(dir=folder) as made:
            training = RottenTraining(Path(made) / "site", np.random.default_rng([seed, number]))
            try:
                wrong = training.run()
            except Exception:
                wrong = [traceback.format_exc()[-2000:]]
        tell([number, [f"{training}: {text}" for text in wrong]])
    return 0


def train_through_rot(rounds: int, seed: int = 0, processes: int | None = None) -> Counts:
    """Does so many rounds of training. The process must have no other threads."""
    counts = Counts()
    processes = processes or usable_cores()
    with tempfile.TemporaryDirectory(prefix="shardio-rot-") as name:
        work = partial(_train_some, Path(name), seed)
        for lane, results, code in listen([Lane(work, n, processes, rounds, BATCH) for n in range(processes)]):
            counts.rounds += len(results)
            counts.violations += [f"round {number} of seed {seed}: {text}" for number, told in results for text in told]
            if code:
                counts.violations.append(f"round {lane.next} of seed {seed}: the process ended with {code}")
                lane.next += lane.step
    return counts


@dataclass
class Counts(attack.Counts):
    """Counts of what happened. Those from `deaths` on should stay zero."""

    kinds: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    """Damages of each kind that opening had to refuse."""
    deaths: int = 0
    hangs: int = 0
    missed: int = 0
    """Damages that were not found, not named or not refused, or that raised an exception."""

    def __str__(self) -> str:
        lines = [
            f"{kind:<24}{count:>8} damages, {self.refused[kind]:>6} of them to be refused at open"
            for kind, count in sorted(self.kinds.items())
        ]
        return "\n".join(lines) + (
            f"\n{self.kinds.total()} damages, {self.missed} not found or not named, {self.deaths} deaths, "
            f"{self.hangs} hangs"
        )


def _damage_some(site: Site, seed: int, numbers: range, tell: Tell) -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in numbers:
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECONDS)  # SIGALRM ends a process that waits for a FIFO
        damage = site.draw(seed, number)
        try:
            wrong = site.try_damage(damage)
        except Exception:
            wrong = traceback.format_exc()
        tell([number, damage.kind, bool(site.seen_at_open(damage)), wrong and f"{damage}: {wrong[-2000:]}"])
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECONDS)
    return 0 if verify(site.folder, workers=1).ok else NOT_MENDED


def damage_set(damages: int, seed: int = 0, processes: int | None = None, say: Say = print) -> Counts:
    """Does so many damages. The process must have no other threads."""
    counts = Counts()
    processes = processes or usable_cores()
    with tempfile.TemporaryDirectory(prefix="shardio-damage-") as name:
        kinds = islice(cycle(SHAPES), processes)
        sites = [_make_site(Path(name) / str(number), pixels) for number, pixels in enumerate(kinds)]
        lanes = [Lane(partial(_damage_some, site, seed), n, processes, damages, BATCH) for n, site in enumerate(sites)]
        for lane, results, code in listen(lanes):
            for number, kind, seen, wrong in results:
                counts.kinds[kind] += 1
                counts.refused[kind] += seen
                if wrong:
                    counts.missed += 1
                    counts.violations.append(f"damage {number} of seed {seed}, {wrong}")
                if counts.kinds.total() % 10_000 == 0:
                    say(f"{counts.kinds.total()} of {damages} damages: {len(counts.violations)} violations")
            if code == NOT_MENDED:
                raise RuntimeError(f"before damage {lane.next} of seed {seed}, the old bytes are no sound set")
            if code:
                site = sites[lane.next % processes]
                damage = site.draw(seed, lane.next)
                hang = code == -signal.SIGALRM
                counts.kinds[damage.kind] += 1
                counts.hangs += hang
                counts.deaths += not hang
                counts.violations.append(f"damage {lane.next} of seed {seed}, {damage}: the process ended with {code}")
                lane.next += lane.step
                for file in damage.changed:
                    site.mend(file)
    return counts


def _make_site(folder: Path, pixels: str) -> Site:
    folder.mkdir()
    write_set(folder / "copies", 1, pixels)
    return Site(folder / "set", write_set(folder / "set", 1, pixels), write_set(folder / "other", 2, pixels))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "the damages", processes=True, folder=False)
    parser.add_argument("--damages", type=int, default=100_000, help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=100, help="of training; default %(default)s")
    chosen = parser.parse_args(arguments)
    trained = train_through_rot(chosen.rounds, chosen.seed, chosen.processes)
    counts = damage_set(chosen.damages, chosen.seed, chosen.processes)
    for violation in trained.violations + counts.violations:
        print(violation)
    print(f"{trained.rounds} rounds of training, {len(trained.violations)} with wrong samples, errors or copies")
    return max(verdict(counts), bool(trained.violations))


if __name__ == "__main__":
    sys.exit(main())
