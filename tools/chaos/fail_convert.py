#!/usr/bin/env python
"""Makes a conversion fail at every call to the disk, in every way that makes sense, and checks what is left.

    python tools/chaos/fail_convert.py [--points 10000] [--seed 0] [--processes N] [--only power]

A point is one call of one conversion that fails in one way: the process is killed before it or halfway through it, a
Ctrl-C arrives, the disk is full or broken for this call or for good, or the power fails and what was not synced is lost
(see faulty_disk.py). Whatever happened, no torn file may be seen, no finished shard or published set be lost, and the
same conversion must then come to the same bytes, keeping every shard that has a record, and leaving nothing else.
When every single point was tried, conversions fail again and again at random ones until there are as many points as
asked for. With fewer, a random choice is made.

Exit code 1 if anything was otherwise. Linux only.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import attack
import torch
from attack import (
    Child,
    Say,
    Tell,
    different_files,
    draw_jpegs,
    hash_files,
    listen,
    make_parser,
    never_sync,
    recorded,
    recorded_shards,
    torn_files,
    verdict,
)
from faulty_disk import Fault, FaultyDisk, kinds_of
from PIL import Image

from shardio.conversion import convert as converter
from shardio.conversion import engine
from shardio.conversion.writing import shard_file as writer
from shardio.errors import ShardioError
from shardio.system.machine import usable_cores

# A conversion of the few small images takes a fraction of a second. One that takes so long hangs.
PATIENCE_SECONDS = 60
# Every conversion refuses so many of the images drawn here.
NUM_BAD = 2
# Exit code of a process that a fault has killed.
KILLED = 137
# Calls without which there is no set: where one of them fails, the conversion must say so.
NEEDED = ("create", "write", "ftruncate", "fsync", "fdatasync", "link", "rename")


# Modules whose names are replaced, in children.
PATCHED_CONVERTER: Any = converter
PATCHED_ENGINE: Any = engine
PATCHED_WRITER: Any = writer


@dataclass(frozen=True)
class Scenario:
    """A way to convert the images."""

    name: str
    size: int = 8
    per_shard: int = 3
    workers: int = 1
    per_block: int = 2
    direct: bool = False
    max_bad: int = NUM_BAD
    """The limit of the conversion that fails. The one that goes on allows what there is."""
    begun: float = 0.0
    """An earlier conversion was killed after this share of its calls."""
    arrays: bool = False
    """Whether the set has masks and pictures of another size, too."""

    def convert(self, images: Path, out: Path, max_bad: int, **options: Any) -> None:
        nbytes = self.size * self.size * 3
        PATCHED_WRITER.BLOCK_NBYTES = self.per_block * nbytes
        PATCHED_WRITER._DIRECT_NBYTES = 0 if self.direct else 1 << 62
        shard_size = 4096 + self.per_shard * nbytes
        options |= {"size": self.size, "shard_size": shard_size, "workers": self.workers, "order": "source"}
        if self.arrays:
            options["masks"] = images / "masks"
        converter.convert(images / "pictures", out, max_bad=max_bad, **options)


SCENARIOS = (
    Scenario("one thread"),
    Scenario("two threads", workers=2),
    # 12,288 bytes are three pages.
    Scenario("past the page cache", size=64, per_shard=5, direct=True),
    Scenario("begun before", begun=0.5),
    Scenario("one shard a split", per_shard=9),
    Scenario("begun within the first shard", per_shard=9, workers=2, begun=0.3),
    Scenario("begun past the page cache", size=64, direct=True, begun=0.7),
    Scenario("too many bad images", max_bad=0),
    Scenario("with arrays", per_shard=5, workers=2, arrays=True),
    Scenario("begun within arrays", per_shard=5, arrays=True, begun=0.7),
)


@dataclass(frozen=True)
class Job:
    """Faults that one conversion meets, one attempt after the other."""

    scenario: Scenario
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        return f"{self.scenario.name}: {', then '.join(map(str, self.faults))}"


@dataclass
class Counts(attack.Counts):
    """Counts of what happened. Those from `torn` on should stay zero."""

    points: Counter[str] = field(default_factory=Counter)
    """Points by kind of fault."""
    jobs: int = 0
    temporary: int = 0
    """Temporary files that were left behind, for the next start to sweep."""
    torn: int = 0
    lost: int = 0
    aborts: int = 0
    hangs: int = 0
    other: int = 0

    @property
    def num_points(self) -> int:
        return self.points.total()

    def violation(self, what: str, text: str) -> None:
        setattr(self, what, getattr(self, what) + 1)
        self.violations.append(f"{what}: {text}")

    def add(self, found: Mapping[str, Any]) -> None:
        self.points.update(found["points"])
        self.violations += found["violations"]
        for name in ("jobs", "temporary", "torn", "lost", "aborts", "hangs", "other"):
            setattr(self, name, getattr(self, name) + found[name])

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.points.items()))
        return (
            f"{kinds}\n{self.jobs} conversions brought to their end, {self.temporary} temporary files swept\n"
            f"{self.num_points} points, {self.torn} torn, {self.lost} lost, {self.aborts} aborts, {self.hangs} hangs, "
            f"{self.other} other violations"
        )


# --- children --------------------------------------------------------------------------------------------------------


def in_child(do: Callable[[Tell], None]) -> tuple[dict[str, Any] | None, int]:
    """Runs `do(tell)` in a child: what it told last, and how it ended."""
    told, code = Child(do, PATIENCE_SECONDS).finish()
    return (told[-1] if told else None), code


def convert_with(scenario: Scenario, images: Path, folder: Path, fault: Fault | None, tell: Tell) -> None:
    """In a child: converts into `folder`/out while the disk has `fault`, and tells what became of it."""
    finished: list[str] = []
    published: list[bool] = []
    do_task, commit_manifest = PATCHED_ENGINE.do_task, PATCHED_CONVERTER.commit_manifest

    def noting_task(task: Any, *how: Any) -> Any:
        record = do_task(task, *how)
        if record.entry is not None:  # there is no file if all of its images were refused
            finished.append(task.name)
        return record

    def noting_set(*args: Any) -> None:
        commit_manifest(*args)
        published.append(True)

    def say(outcome: str, detail: str = "") -> None:
        facts = {"finished": finished, "published": bool(published), "failed": disk.failed, "calls": disk.calls}
        tell({"outcome": outcome, "detail": detail, **facts})

    disk = FaultyDisk(folder, images, fault, lambda: say("died"))
    PATCHED_ENGINE.do_task, PATCHED_CONVERTER.commit_manifest = noting_task, noting_set
    disk.install()
    try:
        scenario.convert(images, folder / "out", scenario.max_bad)
    except KeyboardInterrupt:
        say("interrupted")
    except (ShardioError, OSError) as error:
        say("refused", f"{error}\n{traceback.format_exc()}")
    except BaseException:
        say("abort", traceback.format_exc())
    else:
        say("done")


def go_on(scenario: Scenario, images: Path, out: Path, tell: Tell) -> None:
    """In a child: does the same conversion on a disk that works."""
    never_sync()
    try:
        scenario.convert(images, out, NUM_BAD)
    except BaseException:
        tell({"error": traceback.format_exc()})
    else:
        tell({"error": ""})


# --- jobs ------------------------------------------------------------------------------------------------------------


class Failer:
    """Does jobs, one after the other. `references` holds an undisturbed set per scenario."""

    def __init__(self, images: Path, references: Path, folder: Path) -> None:
        self.images = images
        self.references = references
        self.folder = folder
        self.counts = Counts()
        self._expected: dict[str, dict[str, str]] = {}
        self._begun_at: dict[Scenario, int] = {}

    def make_reference(self, scenario: Scenario) -> list[str]:
        """Makes the undisturbed set of the scenario, and returns the calls of a conversion that meets no fault."""
        told, _ = in_child(lambda tell: go_on(scenario, self.images, self.references / scenario.name, tell))
        if told is None or told["error"]:
            raise RuntimeError(f"{scenario.name}: the undisturbed conversion failed: {told}")
        calls = self._trace(scenario)
        if scenario.begun:
            self._begun_at[scenario] = int(scenario.begun * len(calls))
            calls = self._trace(scenario)
        return calls

    def _trace(self, scenario: Scenario) -> list[str]:
        place = self._begin(scenario)
        told, code = in_child(lambda tell: convert_with(scenario, self.images, place, None, tell))
        if told is None or code or told["outcome"] != ("done" if scenario.max_bad else "refused"):
            raise RuntimeError(f"{scenario.name}: the undisturbed conversion failed: {told}")
        shutil.rmtree(place)
        return list(told["calls"])

    def _begin(self, scenario: Scenario) -> Path:
        """Makes a folder for a conversion, with what an earlier one left there if the scenario says so."""
        place = Path(tempfile.mkdtemp(dir=self.folder))
        if at := self._begun_at.get(scenario):
            fault = Fault(at, "kill halfway")
            in_child(lambda tell: convert_with(scenario, self.images, place, fault, tell))
            if not recorded(place / "out") and scenario.begun >= 0.5:
                raise RuntimeError(f"{scenario.name}: no shard is finished after {fault}")
        return place

    def do(self, job: Job) -> None:
        counts = self.counts
        place = self._begin(job.scenario)
        out = place / "out"
        unread, unsynced = False, set[tuple[str, str]]()
        for fault in job.faults:
            before = recorded(out)
            told, code = in_child(partial(convert_with, job.scenario, self.images, place, fault))
            if told is None or code not in (0, KILLED):
                hang = code == -signal.SIGALRM
                counts.violation("hangs" if hang else "aborts", f"{job}: the process ended with {code}")
                return
            if told["failed"]:  # unless it came to its end before the fault
                counts.points[fault.kind] += 1
                self._check_outcome(job, fault, told)
                # A source that cannot be read is refused, like a bad one. Its shard is made again, when going on.
                unread |= told["failed"][0][1].startswith(f"{self.images}/")
                if unread and told["outcome"] == "done":
                    break  # it was refused instead of a bad one: that is another set
                # What could not be synced is made again, with its shard: its pages are called clean, whatever is there.
                unsynced |= {split_and_number(Path(path).name) for call, path in told["failed"] if call == "fsync"}
                self._check_files(job, out, before, told, unread, unsynced)
        else:
            counts.temporary += len(list(out.rglob(".*.tmp")))
            self._check_end(job, out, unread, unsynced)
        shutil.rmtree(place)

    def _check_outcome(self, job: Job, fault: Fault, told: Mapping[str, Any]) -> None:
        outcome, detail, (call, _) = told["outcome"], told["detail"], told["failed"][0]
        if outcome == "abort":
            self.counts.violation("aborts", f"{job}: {detail}")
        if fault.kind.startswith("E"):
            if outcome == "done" and call in NEEDED:
                self.counts.violation("other", f"{job}: that {call} failed went unnoticed")
            message = detail.partition("\n")[0]
            if outcome == "refused" and not any(str(place) in message for place in (self.folder, self.images)):
                self.counts.violation("other", f"{job}: the error of {call} names no file: {detail}")

    def _check_files(
        self,
        job: Job,
        out: Path,
        before: set[str],
        told: Mapping[str, Any],
        unread: bool,
        unsynced: Set[tuple[str, str]],
    ) -> None:
        whole = (out / "manifest.json").exists()
        faults = torn_files(out, self.references / job.scenario.name)
        if not whole:
            # It may be the list of an unfinished conversion, for the user to mend images.
            faults = [fault for fault in faults if not fault.startswith("rejects.jsonl: differs")]
            if unread:
                faults = [fault for fault in faults if not re.match(r"\S+-\d+\.npy: differs", fault)]
        for fault in faults:
            self.counts.violation("torn", f"{job}: {fault}")
        if told["published"] and not whole:
            self.counts.violation("lost", f"{job}: the set was published, and is gone")
        if not whole:
            kept = {name for name in recorded(out) if (out / name).exists()}
            gone = (before | set(told["finished"]) | recorded(out)) - kept
            if gone := {name for name in gone if split_and_number(name) not in unsynced}:
                self.counts.violation("lost", f"{job}: finished shards are gone: {sorted(gone)}")

    def _check_end(self, job: Job, out: Path, unread: bool, unsynced: Set[tuple[str, str]]) -> None:
        """Does the same conversion on a disk that works. It must end with the same files, and keep finished shards."""
        before = recorded_shards(out)
        told, code = in_child(partial(go_on, job.scenario, self.images, out))
        if told is None or code:
            hang = code == -signal.SIGALRM
            self.counts.violation("hangs" if hang else "aborts", f"{job}: going on ended with {code}")
        elif told["error"]:
            self.counts.violation("other", f"{job}: going on failed: {told['error']}")
        else:
            self.counts.jobs += 1
            name = job.scenario.name
            if name not in self._expected:
                self._expected[name] = hash_files(self.references / name)
            if different := different_files(hash_files(out), self._expected[name]):
                self.counts.violation("other", f"{job}: then other files than the undisturbed set's: {different}")
            again = [one for one, inode in before.items() if (out / one).stat().st_ino != inode]
            again = [name for name in again if split_and_number(name) not in unsynced]
            if again and not unread:
                self.counts.violation("lost", f"{job}: finished shards were made again: {again}")


def split_and_number(name: str) -> tuple[str, str]:
    """Returns what the names of a shard and of its arrays' files have in common."""
    return name.partition("-")[0], name.rpartition("-")[2]


def all_points(calls: Mapping[Scenario, Sequence[str]], seed: int, only: str) -> list[Job]:
    """Returns every call of every scenario, failing in every way whose name begins with `only`, in a random order."""
    jobs = [
        Job(scenario, (Fault(at, kind, at),))
        for scenario, names in calls.items()
        for at, name in enumerate(names, start=1)
        for kind in kinds_of(name)
        if kind.startswith(only)
    ]
    random.Random(seed).shuffle(jobs)
    return jobs


def random_jobs(single: Sequence[Job], seed: int) -> Iterator[Job]:
    """Yields conversions that fail two to four times, at any of the single points of one scenario, without end."""
    rng = random.Random(seed)
    faults: dict[Scenario, list[Fault]] = {}
    for job in single:
        faults.setdefault(job.scenario, []).extend(job.faults)
    while True:
        scenario = rng.choice(list(faults))
        chosen = rng.choices(faults[scenario], k=rng.randint(2, 4))
        yield Job(scenario, tuple(replace(fault, seed=rng.getrandbits(32)) for fault in chosen))


# --- in parallel -----------------------------------------------------------------------------------------------------


def do_jobs(jobs: Sequence[Job], failer: Failer, processes: int, on_counts: Callable[[Counts], None]) -> Counts:
    """Does the jobs in so many processes; `on_counts` is told the counts now and then."""

    def work(lane: int, tell: Tell) -> None:
        for number, job in enumerate(jobs[lane::processes]):
            failer.do(job)
            if number % 16 == 0:
                tell(vars(failer.counts))
        tell(vars(failer.counts))

    failer.counts = Counts()
    latest: dict[Child, Mapping[str, Any]] = {}
    codes = []
    for child, told, code in listen([Child(partial(work, lane)) for lane in range(processes)]):
        codes.append(code)
        if told:
            latest[child] = told[-1]
            on_counts(_sum(latest.values()))
    if any(codes):
        raise RuntimeError("a process that does jobs came to a bad end")
    return _sum(latest.values())


def _sum(parts: Iterable[Mapping[str, Any]]) -> Counts:
    counts = Counts()
    for part in parts:
        counts.add(part)
    return counts


def draw_images(folder: Path, seed: int) -> None:
    """Draws two splits of two classes, 9 + 4 small JPEGs, of which NUM_BAD are bad, and their masks."""
    pictures = folder / "pictures"
    draw_jpegs(pictures, seed, {"train": 9, "val": 4}, 2, (8, 24))
    for path in pictures.glob("*/*/*.jpg"):
        mask = folder / "masks" / path.relative_to(pictures).with_suffix(".png")
        mask.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as picture:
            picture.convert("L").save(mask)
    (pictures / "train" / "class0" / "002.jpg").write_bytes(b"")
    (pictures / "val" / "class1" / "003.jpg").write_bytes(b"<html></html>")


def fail_conversions(
    points: int,
    seed: int = 0,
    processes: int | None = None,
    only: str = "",
    folder: Path | None = None,
    say: Say = print,
) -> Counts:
    """Tries at least so many points in `folder`, by default a temporary one. The process must have no other threads."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fail-convert-", dir=folder) as made:
        here = Path(made)
        draw_images(here / "images", seed)
        (here / "work").mkdir()
        failer = Failer(here / "images", here / "undisturbed", here / "work")
        calls = {scenario: failer.make_reference(scenario) for scenario in SCENARIOS}
        single = all_points(calls, seed, only)
        say(
            "calls: "
            + ", ".join(f"{scenario.name} {len(names)}" for scenario, names in calls.items())
            + f"; {len(single)} single points"
        )
        counts = Counts()

        def show(now: Counts) -> None:
            so_far = counts.num_points + now.num_points
            if so_far - shown[0] >= 500:
                shown[0] = so_far
                say(f"{so_far} of {points} points: {len(counts.violations) + len(now.violations)} violations")

        shown = [0]
        more = random_jobs(single, seed)
        jobs = single[:points]
        while jobs:
            counts.add(vars(do_jobs(jobs, failer, processes or usable_cores(), show)))
            # Some faults are not met: a thread may be quicker this time, or the conversion be at its end before.
            jobs = list(islice(more, -(-(points - counts.num_points) // 2))) if counts.num_points < points else []
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "the order, of what is random, and of the images drawn", processes=True)
    parser.add_argument("--points", type=int, default=10_000, help="default %(default)s")
    parser.add_argument("--only", default="", metavar="KIND", help="only faults whose name begins so, such as power")
    chosen = parser.parse_args(arguments)
    counts = fail_conversions(chosen.points, chosen.seed, chosen.processes, chosen.only, chosen.folder)
    for violation in counts.violations:
        print(violation)
    return verdict(counts)


if __name__ == "__main__":
    sys.exit(main())
