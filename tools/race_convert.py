#!/usr/bin/env python
"""Start two to eight conversions into one folder at once, kill some of them, and check what comes of it.

    python tools/race_convert.py [--rounds 1000] [--seed 0]

In half of the rounds all are the same conversion, in the others some have another seed, and so make another set. At any
moment there may be no set or a whole one, of one conversion and never of two, and no torn file. Of those that were not
killed, the same conversions as the first must all come to their end, the others be refused; if all of the first kind
were killed, it is started again. In the end the folder holds the undisturbed set and nothing else.

Exit code 1 if anything was otherwise. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fail_convert import PATCHED_OS, PATCHED_SHARDTASK, PATCHED_WRITER, PATIENCE_SECONDS, draw_images
from kill_convert import Say, hash_files, torn_files

from shardio.conversion.convert import convert
from shardio.errors import ConvertError
from shardio.format.manifest import load_manifest

OPTIONS: dict[str, Any] = {"size": 8, "shard_size": 4096 + 4 * 8 * 8 * 3, "max_bad": 2}
SEEDS = (1, 2)
"""Of the conversions: their sets have the same samples in another order."""

# How a conversion ends; a signal otherwise.
DONE, REFUSED, FAILED = 0, 3, 4


@dataclass
class Counts:
    """What happened; `violations` should stay empty."""

    rounds: int = 0
    conversions: int = 0
    killed: int = 0
    done: int = 0
    refused: int = 0
    """As the folder was another conversion's."""
    finished_by_killed: int = 0
    """Rounds in which nobody was left to finish the set, so that it was started again."""
    temporary: int = 0
    """Temporary files that lay there when all had ended."""
    unfinished: int = 0
    """Shards that could be gone on with then."""
    torn: int = 0
    mixed: int = 0
    hangs: int = 0
    violations: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.conversions} conversions: {self.done} done, {self.refused} refused, {self.killed} killed; "
            f"{self.finished_by_killed} sets finished later, {self.temporary} temporary files left, "
            f"{self.unfinished} of them to go on with\n"
            f"{self.rounds} rounds, {self.torn} torn, {self.mixed} mixed, {self.hangs} hangs, "
            f"{len(self.violations)} violations"
        )


@dataclass(frozen=True)
class Racer:
    """One conversion, and when it is killed, if at all."""

    seed: int
    workers: int
    start_seconds: float
    kill_seconds: float | None


class Race:
    """Rounds of racing. `folder` holds everything it makes."""

    def __init__(self, images: Path, folder: Path, seed: int, say: Say) -> None:
        self.images = images
        self.folder = folder
        self.say = say
        self.counts = Counts()
        self._random = random.Random(seed)
        self._references = {seed: folder / f"undisturbed-{seed}" for seed in SEEDS}
        start = time.monotonic()
        for number, reference in self._references.items():
            child = self._start(reference, Racer(number, 1, 0, None))
            if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != DONE:
                raise RuntimeError("the undisturbed conversion failed")
        self._span = (time.monotonic() - start) / len(SEEDS)
        self._expected = {seed: hash_files(reference) for seed, reference in self._references.items()}

    def _violation(self, text: str) -> None:
        self.counts.violations.append(text)
        self.say(f"VIOLATION in round {self.counts.rounds}: {text}")

    def _start(self, out: Path, racer: Racer, errors: Path | None = None) -> int:
        child = os.fork()
        if child:
            return child
        code = FAILED
        try:
            signal.alarm(PATIENCE_SECONDS)
            # Nobody loses power here, so that only time would be lost.
            PATCHED_OS.fsync = PATCHED_OS.fdatasync = lambda descriptor: None
            # Every sample is saved, as if it had taken 20 seconds, so that unfinished shards are gone on with.
            PATCHED_SHARDTASK.SAVE_SECONDS, PATCHED_WRITER.BLOCK_NBYTES = 0.0, 8 * 8 * 3
            time.sleep(racer.start_seconds)
            convert(self.images, out, seed=racer.seed, workers=racer.workers, **OPTIONS)
            code = DONE
        except ConvertError as error:
            code = REFUSED
            self._note(errors, str(error))
        except BaseException:
            self._note(errors, traceback.format_exc())
        finally:
            os._exit(code)

    def _note(self, errors: Path | None, text: str) -> None:
        if errors is not None:
            (errors / str(os.getpid())).write_text(text)

    def _draw_racers(self) -> list[Racer]:
        rng = self._random
        count = rng.randint(2, 8)
        same, killed = rng.random() < 0.5, rng.choice((0.3, 0.6, 1.0))
        racers = []
        for _ in range(count):
            start = rng.random() * rng.choice((0, 0.1, 1)) * self._span
            kill = start + rng.random() * rng.choice((0.5, 1, 2)) * self._span if rng.random() < killed else None
            seed = SEEDS[0] if same or rng.random() < 0.6 else SEEDS[1]
            racers.append(Racer(seed, rng.choice((1, 1, 2)), start, kill))
        return racers

    def run(self, rounds: int) -> None:
        for number in range(1, rounds + 1):
            self.counts.rounds = number
            self._round(self._draw_racers())
            if number % 100 == 0:
                self.say(f"{number} of {rounds} rounds: {len(self.counts.violations)} violations")

    def _round(self, racers: Sequence[Racer]) -> None:
        counts = self.counts
        out, errors = self.folder / "out", self.folder / "errors"
        errors.mkdir()
        start = time.monotonic()
        children = {self._start(out, racer, errors): racer for racer in racers}
        counts.conversions += len(children)
        to_kill = {child: racer.kill_seconds for child, racer in children.items() if racer.kill_seconds is not None}
        for child, seconds in sorted(to_kill.items(), key=lambda pair: pair[1]):
            time.sleep(max(0.0, start + seconds - time.monotonic()))
            os.kill(child, signal.SIGKILL)
            self._check_moment(out)
        codes = {child: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
        self._check_moment(out)
        seed = self._owner(out)
        for child, code in codes.items():
            self._check_end(children[child], code, seed, errors / str(child))
        if seed is None:
            seed = SEEDS[0]
        counts.temporary += len(list(out.rglob(".*.tmp")))
        counts.unfinished += len(list(out.rglob("*.journal")))
        counts.finished_by_killed += not (out / "manifest.json").exists()
        self._finish(out, seed)
        shutil.rmtree(errors)

    def _owner(self, out: Path) -> int | None:
        """The seed of the conversion that the folder belongs to, if it has come to that."""
        for _ in range(2):  # the plan may be removed, as the set was published, between one look and the other
            with suppress(FileNotFoundError):
                return int(load_manifest(out).provenance["conversion"]["seed"])
            with suppress(FileNotFoundError):
                return int(json.loads((out / ".convert" / "plan.json").read_bytes())["seed"])
        return None

    def _check_end(self, racer: Racer, code: int, owner: int | None, note: Path) -> None:
        counts = self.counts
        text = note.read_text() if note.exists() else ""
        if code == -signal.SIGKILL and racer.kill_seconds is not None:
            counts.killed += 1
        elif code == -signal.SIGALRM:
            counts.hangs += 1
            self._violation(f"{racer} hangs")
        elif code == DONE and racer.seed == owner:
            counts.done += 1
        elif code == REFUSED and racer.seed != owner and "of another" in text:
            counts.refused += 1
        else:
            self._violation(f"{racer} ended with {code} in a folder of seed {owner}: {text}")

    def _check_moment(self, out: Path) -> None:
        """While others may be at work."""
        faults = {seed: torn_files(out, reference) for seed, reference in self._references.items()}
        if all(faults.values()):
            # Files that are sound, but not all of one set, differ from some of each.
            mixed = all(": differs from" in fault for found in faults.values() for fault in found)
            self.counts.mixed += mixed
            self.counts.torn += not mixed
            self._violation(f"files of no set: {faults}")

    def _finish(self, out: Path, seed: int) -> None:
        """The conversion that the folder belongs to, undisturbed: all files must be those of the undisturbed set."""
        child = self._start(out, Racer(seed, 1, 0, None))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != DONE:
            self._violation(f"going on ended with {code}")
        elif (found := hash_files(out)) != self._expected[seed]:
            names = sorted(found.keys() | self._expected[seed].keys())
            different = [name for name in names if found.get(name) != self._expected[seed].get(name)]
            self._violation(f"other files than those of the undisturbed set: {different}")
        shutil.rmtree(out)


def race_conversions(rounds: int, seed: int = 0, folder: Path | None = None, say: Say = print) -> Counts:
    """Do so many rounds in `folder` (a temporary one by default). In a process that has no other threads."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="race-convert-", dir=folder) as made:
        here = Path(made)
        draw_images(here / "images", seed)
        race = Race(here / "images", here, seed, say)
        race.run(rounds)
    return race.counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1000, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the moments, and of the images drawn")
    parser.add_argument("--folder", type=Path, help="where to make everything; a temporary folder by default")
    chosen = parser.parse_args(arguments)
    counts = race_conversions(chosen.rounds, chosen.seed, chosen.folder)
    print(counts)
    return 1 if counts.violations else 0


if __name__ == "__main__":
    sys.exit(main())
