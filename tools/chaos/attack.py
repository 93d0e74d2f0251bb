"""The shared part of the attacks: counts, child processes with limits, images and sets, and a command line.

An attack counts what happened, prints it, and exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import select
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shardio.conversion.writing.set_writer import ShardWriter
from shardio.errors import ShardioError
from shardio.sets.verify import verify

Say = Callable[[str], None]
Tell = Callable[[Any], None]

PATCHED_OS: Any = os


@dataclass
class Counts:
    """Counts of what happened. `violations` should stay empty."""

    rounds: int = 0
    violations: list[str] = field(default_factory=list)


AnyCounts = TypeVar("AnyCounts", bound=Counts)


class Rounds(Generic[AnyCounts]):
    """Rounds of an attack at random moments. `folder` holds everything they make."""

    def __init__(self, folder: Path, seed: int, say: Say, counts: AnyCounts) -> None:
        self.folder = folder
        self.say = say
        self.counts = counts
        self._random = random.Random(seed)

    def _violation(self, text: str) -> None:
        self.counts.violations.append(text)
        self.say(f"VIOLATION in round {self.counts.rounds}: {text}")


# --- the command line ------------------------------------------------------------------------------------------------


def make_parser(
    doc: str | None, seed_of: str, *, processes: bool = False, folder: bool = True
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help=f"seed of {seed_of}; default %(default)s")
    if processes:
        parser.add_argument("--processes", type=int, help="default: one for each core")
    if folder:
        parser.add_argument("--folder", type=Path, help="folder for everything; default: a temporary one")
    return parser


def verdict(counts: Counts) -> int:
    """Prints the counts, and returns the exit code."""
    print(counts)
    return 1 if counts.violations else 0


# --- child processes -------------------------------------------------------------------------------------------------


class Child:
    """A forked process that does `work`, and tells what it finds. Each message is a line of JSON.

    It exits with what `work` returns, or with 1 if `work` raises. SIGALRM ends it after `patience_seconds`, if any. The
    process that forks must not have other threads.
    """

    def __init__(self, work: Callable[[Tell], int | None], patience_seconds: int = 0) -> None:
        self._work = work
        self._patience_seconds = patience_seconds
        self.start()

    def start(self) -> None:
        self.reader, told = os.pipe()
        self._unread = b""
        self.pid = os.fork()
        if not self.pid:
            self._run(told)
        os.close(told)

    def _run(self, told: int) -> NoReturn:
        code = 1
        try:
            signal.alarm(self._patience_seconds)
            os.close(self.reader)
            code = self._work(lambda message: _write_line(told, message)) or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def read(self) -> tuple[list[Any], int | None]:
        """Waits for messages, or for the end. Returns the messages, and how the process ended, if it did."""
        data = os.read(self.reader, 1 << 20)
        *lines, self._unread = (self._unread + data).split(b"\n")
        code = None
        if not data:
            os.close(self.reader)
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return [json.loads(line) for line in lines], code

    def finish(self) -> tuple[list[Any], int]:
        """Waits for the end. Returns all messages that were not read, and how the process ended."""
        messages: list[Any] = []
        while True:
            more, code = self.read()
            messages += more
            if code is not None:
                return messages, code

    def go_on(self) -> bool:
        """Starts another process when one has ended, and returns True, if anything is left to do."""
        return False


class Lane(Child):
    """A child that does every `step`-th number from `first` on, and begins each message with the number it has done.

    Another process goes on after `batch` numbers, and after a death. `next` is the first number that is not done.
    """

    def __init__(
        self, work: Callable[[range, Tell], int | None], first: int, step: int, stop: int, batch: int | None = None
    ) -> None:
        self.next, self.step, self._stop = first, step, stop
        some = stop if batch is None else batch * step
        super().__init__(lambda tell: work(range(self.next, min(stop, self.next + some), step), tell))

    def read(self) -> tuple[list[Any], int | None]:
        messages, code = super().read()
        if messages:
            self.next = messages[-1][0] + self.step
        return messages, code

    def go_on(self) -> bool:
        if self.next < self._stop:
            self.start()
        return self.next < self._stop


AnyChild = TypeVar("AnyChild", bound=Child)


def listen(children: Iterable[AnyChild]) -> Iterator[tuple[AnyChild, list[Any], int | None]]:
    """Yields the messages of all children, and how each ended, until all have ended and none goes on."""
    open_ends = {child.reader: child for child in children}
    while open_ends:
        for reader in select.select(list(open_ends), [], [])[0]:
            child = open_ends.pop(reader)
            messages, code = child.read()
            yield child, messages, code
            if code is None or child.go_on():
                open_ends[child.reader] = child


def _write_line(descriptor: int, message: Any) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def never_sync() -> None:
    """Leaves out fsync in this process, where no power is lost and syncing would only take time."""
    PATCHED_OS.fsync = PATCHED_OS.fdatasync = lambda descriptor: None


# --- images and sets -------------------------------------------------------------------------------------------------


def draw_jpegs(folder: Path, seed: int, counts: Mapping[str, int], num_classes: int, sides: tuple[int, int]) -> None:
    """Draws so many JPEGs for each split: SPLIT/classN/NNN.jpg, of random sizes from sides[0] to below sides[1]."""
    rng = np.random.default_rng(seed)
    for split, count in counts.items():
        for number in range(count):
            path = folder / split / f"class{number % num_classes}" / f"{number:03d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            height, width = (int(n) for n in rng.integers(*sides, 2))
            coarse = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
            picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)
            picture.save(path, "JPEG", quality=90)


def write_set(folder: Path, images: NDArray[np.uint8], num_classes: int, samples_per_shard: int) -> None:
    """Publishes a set of these images. The label of image i is i modulo `num_classes`."""
    with ShardWriter(folder, images.shape[1:], shard_nbytes=4096 + samples_per_shard * images[0].nbytes) as writer:
        for number, image in enumerate(images):
            writer.append(image, number % num_classes)


def hash_files(folder: Path) -> dict[str, str]:
    """Returns sha256 of every file at or below `folder`. Folders count, too, so that an empty one left over is seen."""
    return {
        str(path.relative_to(folder)): "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
    }


def different_files(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Returns the names of files that `hash_files` found otherwise, or in one of two folders only."""
    return [name for name in sorted(found.keys() | expected.keys()) if found.get(name) != expected.get(name)]


def torn_files(out: Path, reference: Path) -> list[str]:
    """Returns what is wrong with the visible files of OUT. Nothing may be, at any moment of a conversion."""
    faults = []
    for path in sorted(out.glob("[!.]*")):
        expected = reference / path.name
        if not expected.exists():
            faults.append(f"{path.name}: not a file of the finished set")
            continue
        if path.suffix == ".npy":
            try:
                array = np.load(path, mmap_mode="r")
            except (OSError, ValueError, EOFError) as error:
                faults.append(f"{path.name}: NumPy cannot open it: {error}")
                continue
            nbytes = 4096 + array.nbytes
            if path.stat().st_size != nbytes:
                faults.append(f"{path.name}: its header implies {nbytes} bytes, found {path.stat().st_size}")
                continue
        if path.read_bytes() != expected.read_bytes():
            faults.append(f"{path.name}: differs from the undisturbed one")
    if (out / "manifest.json").exists():
        try:
            faults += [f"published, but {problem.detail}" for problem in verify(out).problems]
        except ShardioError as error:
            faults.append(f"published, but {error}")
    return faults


def recorded(out: Path) -> set[str]:
    """Returns the names of the shards that have a record, and so must exist. If all images of a shard were refused, it
    has a record but no file."""
    records = (path for path in (out / ".convert").glob("*.npy.json") if not path.name.startswith("."))
    return {path.name.removesuffix(".json") for path in records if b'"entry": null' not in path.read_bytes()}


def recorded_shards(out: Path) -> dict[str, int]:
    """Returns the inode of each shard that has a record: such a shard must not be made again."""
    return {name: (out / name).stat().st_ino for name in recorded(out) if (out / name).exists()}
