#!/usr/bin/env python
"""Starts two to eight conversions into one folder at once, kills some of them, and checks the result.

    python tools/chaos/race_convert.py [--rounds 1000] [--seed 0]

In half of the rounds all are the same conversion, in the others some have another seed, and so make another set. At any
moment there may be no set or a whole one, of one conversion and never of two, and no torn file. Conversions that are
the same as the first and were not killed must all come to their end, the others be refused; if all of the first kind
were killed, it is started again. In the end the folder holds the undisturbed set and nothing else.

Exit code 1 if anything was otherwise. Linux only.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attack
import torch
from attack import Child, Rounds, Say, Tell, different_files, hash_files, make_parser, never_sync, torn_files, verdict
from fail_convert import PATCHED_WRITER, PATIENCE_SECONDS, draw_images

from shardio.conversion.convert import convert
from shardio.errors import ConvertError
from shardio.format.manifest_file import load_manifest

OPTIONS: dict[str, Any] = {"size": 8, "shard_size": 4096 + 4 * 8 * 8 * 3, "max_bad": 2}
SEEDS = (1, 2)
"""The seeds of the conversions: their sets have the same samples in another order."""

# The exit codes of a conversion that no signal ends.
DONE, REFUSED, FAILED = 0, 3, 4


@dataclass
class Counts(attack.Counts):
    conversions: int = 0
    killed: int = 0
    done: int = 0
    refused: int = 0
    """Conversions that were refused because the folder was another's."""
    finished_by_killed: int = 0
    """Rounds in which all that could finish the set were killed, so that it was started again."""
    temporary: int = 0
    """Temporary files that lay there when all had ended."""
    torn: int = 0
    mixed: int = 0
    hangs: int = 0

    def __str__(self) -> str:
        return (
            f"{self.conversions} conversions: {self.done} done, {self.refused} refused, {self.killed} killed; "
            f"{self.finished_by_killed} sets finished later, {self.temporary} temporary files left\n"
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


class Race(Rounds[Counts]):
    """Rounds of racing."""

    def __init__(self, images: Path, folder: Path, seed: int, say: Say) -> None:
        super().__init__(folder, seed, say, Counts())
        self.images = images
        self._references = {seed: folder / f"undisturbed-{seed}" for seed in SEEDS}
        start = time.monotonic()
        for number, reference in self._references.items():
            if self._start(reference, Racer(number, 1, 0, None)).finish()[1] != DONE:
                raise RuntimeError("the undisturbed conversion failed")
        self._span = (time.monotonic() - start) / len(SEEDS)
        self._expected = {seed: hash_files(reference) for seed, reference in self._references.items()}

    def _start(self, out: Path, racer: Racer) -> Child:
        def work(tell: Tell) -> int:
            never_sync()
            PATCHED_WRITER.BLOCK_NBYTES = 8 * 8 * 3  # every sample is a write of its own
            time.sleep(racer.start_seconds)
            try:
                convert(self.images / "pictures", out, seed=racer.seed, workers=racer.workers, **OPTIONS)
            except ConvertError as error:
                tell(str(error))
                return REFUSED
            except BaseException:
                tell(traceback.format_exc())
                return FAILED
            return DONE

        return Child(work, PATIENCE_SECONDS)

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
        out = self.folder / "out"
        start = time.monotonic()
        children = {self._start(out, racer): racer for racer in racers}
        counts.conversions += len(children)
        to_kill = {child: racer.kill_seconds for child, racer in children.items() if racer.kill_seconds is not None}
        for child, seconds in sorted(to_kill.items(), key=lambda pair: pair[1]):
            time.sleep(max(0.0, start + seconds - time.monotonic()))
            os.kill(child.pid, signal.SIGKILL)
            self._check_moment(out)
        ends = [(racer, *child.finish()) for child, racer in children.items()]
        self._check_moment(out)
        seed = self._owner(out)
        for racer, told, code in ends:
            self._check_end(racer, code, seed, "".join(told))
        if seed is None:
            seed = SEEDS[0]
        counts.temporary += len(list(out.rglob(".*.tmp")))
        counts.finished_by_killed += not (out / "manifest.json").exists()
        self._finish(out, seed)

    def _owner(self, out: Path) -> int | None:
        """Returns the seed of the conversion that the folder belongs to, if it has come to that."""
        for _ in range(2):  # the plan may be removed, as the set was published, between one look and the other
            with suppress(FileNotFoundError):
                return int(load_manifest(out).provenance["conversion"]["seed"])
            with suppress(FileNotFoundError):
                return int(json.loads((out / ".convert" / "plan.json").read_bytes())["seed"])
        return None

    def _check_end(self, racer: Racer, code: int, owner: int | None, text: str) -> None:
        counts = self.counts
        if code == -signal.SIGKILL and racer.kill_seconds is not None:
            counts.killed += 1
        elif code == -signal.SIGALRM:
            counts.hangs += 1
            self._violation(f"{racer} hangs")
        elif code == DONE and racer.seed == owner:
            counts.done += 1
        elif code == REFUSED and racer.seed != owner and ("of another" in text or "with other" in text):
            counts.refused += 1
        else:
            self._violation(f"{racer} ended with {code} in a folder of seed {owner}: {text}")

    def _check_moment(self, out: Path) -> None:
        """Checks what is there while conversions may be at work."""
        faults = {seed: torn_files(out, reference) for seed, reference in self._references.items()}
        if all(faults.values()):
            # Sound files of two sets differ from some of each set.
            mixed = all(": differs from" in fault for found in faults.values() for fault in found)
            self.counts.mixed += mixed
            self.counts.torn += not mixed
            self._violation(f"files of no set: {faults}")

    def _finish(self, out: Path, seed: int) -> None:
        """Does the folder's conversion undisturbed, and checks that all files are those of the undisturbed set."""
        told, code = self._start(out, Racer(seed, 1, 0, None)).finish()
        if code != DONE:
            self._violation(f"going on ended with {code}: {''.join(told)}")
        elif different := different_files(hash_files(out), self._expected[seed]):
            self._violation(f"other files than those of the undisturbed set: {different}")
        shutil.rmtree(out)


def race_conversions(rounds: int, seed: int = 0, folder: Path | None = None, say: Say = print) -> Counts:
    """Does so many rounds in `folder`, by default a temporary one. The process must have no other threads."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="race-convert-", dir=folder) as made:
        here = Path(made)
        draw_images(here / "images", seed)
        race = Race(here / "images", here, seed, say)
        race.run(rounds)
    return race.counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "the moments and of the images drawn")
    parser.add_argument("--rounds", type=int, default=1000, help="default %(default)s")
    chosen = parser.parse_args(arguments)
    return verdict(race_conversions(chosen.rounds, chosen.seed, chosen.folder))


if __name__ == "__main__":
    sys.exit(main())
