#!/usr/bin/env python
"""Gives sets their names on a filesystem that then loses its power, and looks at what is on the disk.

    python tools/chaos/lose_power.py [--rounds 100] [--seed 0]

Each round mounts a new filesystem, ext4 or XFS, from a file, and copies sets to it that stay in the page cache. A
command makes a set of them: to its end; or it is killed at a random moment, and perhaps made again; or the first sync
of one of its files fails, and every later sync of that file says that all is well, as Linux does. Then the filesystem
goes down, with or without what its journal has not written, and is mounted again. A set that has its name must be
whole, and where the command said that it has made a set, there must be one.

Needs root, loop devices and mkfs; without them it says so, and exits with 0. Exit code 1 if anything was otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import attack
import numpy as np
from attack import PATCHED_OS, Child, Rounds, Say, Tell, draw_jpegs, make_parser, verdict, write_set

from shardio.cache.stage import stage
from shardio.changes.change import change
from shardio.changes.merge import merge
from shardio.conversion.convert import convert
from shardio.errors import ConvertError, ShardioError
from shardio.format.manifest_file import load_manifest
from shardio.sets.publish import publish
from shardio.sets.selection import Selection
from shardio.sets.verify import verify

# The size of the file with the filesystem. It is sparse.
NBYTES = {"ext4": 64 << 20, "xfs": 320 << 20}
# Linux: <linux/fs.h>. The journal is written first, or not.
SHUT_DOWN, WITH_JOURNAL, WITHOUT_JOURNAL = 0x8004587D, 1, 2
PATIENCE_SECONDS = 120

COMMANDS: dict[str, Callable[[Path, Path, Path], object]] = {
    "convert": lambda disk, images, new: convert(images, new, size=32, shard_size=16 << 10, workers=1),
    "publish": lambda disk, images, new: publish(disk / "one", new),
    "publish --move": lambda disk, images, new: publish(disk / "one", new, move=True),
    "change": lambda disk, images, new: change(disk / "one", new, drop=Selection(indices=[3])),
    "merge": lambda disk, images, new: merge([disk / "one", disk / "two"], new, same_keys="allow"),
    "stage": lambda disk, images, new: stage(images.parent / "one", new.parent),
}
FATES = ("done", "killed", "killed and done", "a sync fails")


@dataclass
class Counts(attack.Counts):
    fates: Counter[str] = field(default_factory=Counter)
    whole: int = 0
    """Sets that had their names afterwards."""

    def __str__(self) -> str:
        fates = ", ".join(f"{count} {fate}" for fate, count in sorted(self.fates.items()))
        return f"{fates}; {self.whole} whole sets\n{self.rounds} rounds, {len(self.violations)} violations"


def why_not(folder: Path) -> str:
    """Returns why no filesystem can be mounted here; "" if one can."""
    try:
        with mounted(folder, "ext4", shut_down=None):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"skipped: root, loop devices and mkfs are needed: {error}"


@contextlib.contextmanager
def mounted(folder: Path, kind: str, shut_down: int | None, new: bool = True) -> Iterator[Path]:
    image, disk = folder / "image", folder / "disk"
    run = partial(subprocess.run, check=True, capture_output=True)
    if new:
        image.unlink(missing_ok=True)
        image.touch()
        os.truncate(image, NBYTES[kind])
        run([f"mkfs.{kind}", "-q", image])
    disk.mkdir(exist_ok=True)
    run(["mount", "-o", "loop", image, disk])
    try:
        yield disk
        if shut_down is not None:
            descriptor = os.open(disk, os.O_RDONLY)
            fcntl.ioctl(descriptor, SHUT_DOWN, struct.pack("I", shut_down))
            os.close(descriptor)
    finally:
        run(["umount", disk])
        # A process that began a mount namespace meanwhile holds it: until then, another mount is of what is down.
        while run(["losetup", "--associated", image]).stdout:
            time.sleep(0.01)


class Losing(Rounds[Counts]):
    def __init__(self, folder: Path, seed: int, say: Say) -> None:
        super().__init__(folder, seed, say, Counts())
        draw_jpegs(folder / "images", seed, {"train": 24}, 2, (40, 60))
        for number, name in enumerate(("one", "two")):
            images = np.random.default_rng(seed + number).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
            write_set(folder / name, images, 2, 10)
        self._seconds = dict.fromkeys(COMMANDS, 0.5)
        self._kinds = [kind for kind in NBYTES if shutil.which(f"mkfs.{kind}")]

    def _work(self, command: str, new: Path, fault: int | None, tell: Tell) -> None:
        if fault is not None:
            fail_sync(new.parents[1], fault)
        for _ in range(1 if fault is None else 2):
            with contextlib.suppress(OSError, ConvertError):  # a set that is there already is not made again
                COMMANDS[command](self.folder / "disk", self.folder / "images", new)
                tell(True)
                return

    def _run(self, command: str, new: Path, seconds: float | None = None, fault: int | None = None) -> bool:
        """Runs the command, and kills it after `seconds`. Returns whether it said that it has made the set."""
        child = Child(partial(self._work, command, new, fault), PATIENCE_SECONDS)
        if seconds is not None:
            time.sleep(seconds)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        return bool(child.finish()[0])

    def round(self) -> None:
        draw = self._random
        kind, command, fate = draw.choice(self._kinds), draw.choice(list(COMMANDS)), draw.choice(FATES)
        where = f"{command} on {kind}, {fate}"
        synced = draw.random() < 0.3
        name = load_manifest(self.folder / "one").digest if command == "stage" else "new"
        with mounted(self.folder, kind, draw.choice((WITH_JOURNAL, WITHOUT_JOURNAL))) as disk:
            (disk / "root").mkdir()
            new = disk / "root" / name
            PATCHED_OS.sync()
            for one in ("one", "two"):
                shutil.copytree(self.folder / one, disk / one)
            if synced:
                PATCHED_OS.sync()
            begun = time.monotonic()
            if fate.startswith("killed"):
                said = self._run(command, new, draw.uniform(0, self._seconds[command]))
                said = (fate == "killed and done" and self._run(command, new)) or said
            else:
                said = self._run(command, new, fault=draw.randrange(8) if fate == "a sync fails" else None)
                self._seconds[command] = time.monotonic() - begun
        with mounted(self.folder, kind, None, new=False) as disk:
            self._judge(where, disk / "root" / name, disk / "one", said, command.endswith("move") and synced)
        self.counts.rounds += 1
        self.counts.fates[fate] += 1

    def _judge(self, where: str, new: Path, one: Path, said: bool, one_must_be: bool) -> None:
        found = {folder: problem_of(folder) for folder in (new, one)}
        if found[new] is None:
            if said:
                self._violation(f"lost: {where}: no set, though the command has made one")
            elif one_must_be and found[one] != "":
                self._violation(f"lost: {where}: neither the new set nor the old one: {found[one]}")
        elif found[new]:
            self._violation(f"torn: {where}: {found[new]}")
        else:
            self.counts.whole += 1


def problem_of(folder: Path) -> str | None:
    """Returns what is wrong with the set in a folder; "" if it is whole, None if there is none."""
    if not os.path.lexists(folder / "manifest.json"):
        return None
    try:
        return "; ".join(problem.detail for problem in verify(folder).problems)
    except (ShardioError, OSError) as error:
        return str(error)


def fail_sync(disk: Path, number: int) -> None:
    """Makes the first sync of file `number` on the disk fail in this process, and later ones of it do nothing.

    A file with several names is spared: a set of links shares the damage of the set that it was made from.
    """
    real, failed, count = os.fsync, dict[int, int](), [number]

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        if status.st_ino in failed:
            return
        path = f"/proc/self/fd/{descriptor}"
        if os.path.isfile(path) and os.readlink(path).startswith(str(disk)) and status.st_nlink == 1:
            count[0] -= 1
            if count[0] == -1:
                failed[status.st_ino] = os.dup(descriptor)  # or another file may get the number
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    PATCHED_OS.fsync = fsync


def lose_power(rounds: int, seed: int = 0, folder: Path | None = None, say: Say = print) -> Counts | None:
    """Returns the counts; None, after saying why, if no filesystem can be mounted."""
    with tempfile.TemporaryDirectory(prefix="lose-power-", dir=folder) as made:
        if reason := why_not(Path(made)):
            say(reason)
            return None
        losing = Losing(Path(made), seed, say)
        for _ in range(rounds):
            losing.round()
    return losing.counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "the order, of what is random, and of the images drawn")
    parser.add_argument("--rounds", type=int, default=100, help="default %(default)s")
    chosen = parser.parse_args(arguments)
    counts = lose_power(chosen.rounds, chosen.seed, chosen.folder)
    return 0 if counts is None else verdict(counts)


if __name__ == "__main__":
    sys.exit(main())
