#!/usr/bin/env python
"""Prints the path of one operation through the package: the files it visits, in order, and how deep its calls go.

    python tools/walk.py [--under FUNCTION] COMMAND...    of a command, such as `stage out/ cache/`
    python tools/walk.py --batch SET                      of one augmented batch on the CPU, in all threads

A re-entry is a call into a file that was visited before and has been left since. Frames are the package's own, one
above the other. With --under, only calls below FUNCTION count. Commands run in this process; what they hand to other
processes is not seen, so give `--workers 1`.
"""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import shardio

PACKAGE = str(Path(shardio.__file__).parent)


class Walk:
    """Watches the calls of all threads while `watching`."""

    def __init__(self, under: str | None) -> None:
        self.under = under
        self.watching = False
        self.files: dict[str, int] = {}  # and the calls into each that came from another file
        self.deepest: list[str] = []
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event != "call" or not self.watching or not path.startswith(PACKAGE):
            return
        stack = []
        above: FrameType | None = frame
        while above is not None:
            if above.f_code.co_filename.startswith(PACKAGE):
                stack.append(above)
            above = above.f_back
        names = [frame.f_code.co_name for frame in stack]
        if self.under is not None:
            if self.under not in names:
                return
            stack = stack[: names.index(self.under) + 1]
        if len(stack) > len(self.deepest):
            self.deepest = [f"{_below(frame)}: {frame.f_code.co_name}" for frame in reversed(stack)]
        if len(stack) < 2 or stack[1].f_code.co_filename != path:
            self.files[_below(frame)] = self.files.get(_below(frame), 0) + 1

    def print(self, times: int = 1) -> None:
        self.watching = False
        entries = sum(self.files.values()) / times
        print(*self.files, sep="\n")
        print(
            f"{len(self.files)} files, {max(0, entries - len(self.files)):.0f} re-entries, {len(self.deepest)} frames:"
        )
        print(*(f"  {place}" for place in self.deepest), sep="\n")


def _below(frame: FrameType) -> str:
    return str(Path(frame.f_code.co_filename).relative_to(PACKAGE))


def walk_batches(path: str, walk: Walk, batches: int = 20) -> None:
    from shardio import ShardLoader
    from shardio.augment import Compose, HorizontalFlip, Normalize, RandomResizedCrop

    transform = Compose([RandomResizedCrop(32), HorizontalFlip(), Normalize("imagenet")])
    with ShardLoader(path, 8, device="cpu", num_threads=1, prefetch=1, transform=transform) as loader:
        iterator = (batch for _ in range(batches + 5) for batch in loader)
        for _ in range(5):
            next(iterator)
        walk.watching = True
        for _ in range(batches):
            next(iterator)
        walk.print(batches)


def walk_command(words: list[str], walk: Walk) -> None:
    from shardio.cli.main import cli

    walk.watching = True
    cli(words, prog_name="shardio", standalone_mode=False)
    walk.print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--under", metavar="FUNCTION")
    parser.add_argument("--batch", metavar="SET")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if given.batch:
        walk_batches(given.batch, Walk(given.under))
    else:
        walk_command(given.command, Walk(given.under))
