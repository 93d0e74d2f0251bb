#!/usr/bin/env python
"""Kills conversions at random moments, and checks after each kill that nothing is torn and nothing finished lost.

    python tools/chaos/kill_convert.py [--rounds 500] [--seed 0] [--images DIR]

Each round converts in a process group of its own and kills, with SIGKILL, the whole group or only the process that
started the workers. What is left is checked against an undisturbed conversion: no manifest unless the set is whole,
every visible file equal to the undisturbed one, shards with a record never made again, and no worker alive a few
seconds after that, or after its imports. After a few kills the same conversion is let finish and all its files must be
the undisturbed ones.
Exit code 1 if anything was otherwise. Linux only: it looks into /proc and waits on pidfds.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import attack
from attack import (
    Rounds,
    Say,
    different_files,
    draw_jpegs,
    hash_files,
    make_parser,
    recorded_shards,
    torn_files,
    verdict,
)

from shardio.sets.verify import verify

OPTIONS: dict[str, Any] = {"size": 48, "shard_size": 4096 + 8 * 48 * 48 * 3, "max_bad": 10}

# One process, with threads; and two worker processes beside the one that started them.
IN_PROCESS, IN_WORKERS = 2, 5

# The weights of the moments to kill at. Most of the work lies between the first image and the last; publishing is
# short and delicate, so that it gets more than its share.
WEIGHTS = {"begin": 0.15, "work": 0.6, "last": 0.25}

# This time begins when all workers have started: one that still imports the main module notices nothing before that is
# done, and the time for that depends on what else the machine does.
ORPHANS_MAY_LIVE_SECONDS = 3.0
# A conversion of the small tree takes one second, on a loaded machine more. One that takes so long hangs.
PATIENCE_SECONDS = 120.0

# Prints a line at each moment that a kill may wait for, and waits itself, with everything imported, until it is told
# what to convert.
_DRIVER = """\
import json
import sys

from shardio.conversion.writing import shard_file as writer
from shardio.conversion.convert import convert

# Worker processes import this, too: a shard has several blocks.
writer.BLOCK_NBYTES = 2 * 48 * 48 * 3


def say(line):
    print(line, flush=True)


def main():
    say("ready")
    src, out, options = json.loads(sys.stdin.readline())
    seen = set()

    def tell(progress):
        for line, true in (("work", progress.done > 0), ("last", progress.done == progress.total)):
            if true and line not in seen:
                seen.add(line)
                say(line)

    say("begin")
    convert(src, out, on_progress=tell, **options)
    say("done")


with open("/proc/self/comm", "w") as name:
    name.write("imported")

if __name__ == "__main__":
    main()
"""


@dataclass
class Counts(attack.Counts):
    before: int = 0
    """Kills before the first image was done."""
    during: int = 0
    """Kills between the first image and the last."""
    publishing: int = 0
    """Kills between the last image and the end."""
    after: int = 0
    """Conversions that finished before the kill came."""
    parent_only: int = 0
    with_workers: int = 0
    resumed: int = 0
    identical: int = 0
    temporary: int = 0
    """Temporary files that kills left behind, for the next start to sweep."""
    torn: int = 0

    def __str__(self) -> str:
        return (
            f"rounds {self.rounds} ({self.with_workers} with worker processes, {self.parent_only} killed the parent "
            f"only): kills before the work {self.before}, during {self.during}, while publishing {self.publishing}, "
            f"after {self.after}\n"
            f"resumed {self.resumed}, identical {self.identical}, temporary files left by kills {self.temporary}, "
            f"torn {self.torn}, violations {len(self.violations)}"
        )


# --- processes -------------------------------------------------------------------------------------------------------


def _group_members(group: int) -> list[int]:
    """Returns the processes of a group that have not ended."""
    members = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The name of the program, in parentheses, may hold anything. Behind it: state, parent, group.
        state, _, its_group = stat.rpartition(")")[2].split()[:3]
        if int(its_group) == group and state not in "ZX":
            members.append(int(entry))
    return members


def _wait_for_end(group: int, seconds: float) -> list[int]:
    """Waits for the group's end. Returns the processes that still live after so many seconds."""
    deadline = time.monotonic() + seconds
    while members := _group_members(group):
        try:
            pidfd = os.pidfd_open(members[0])
        except ProcessLookupError:
            continue
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return members
        finally:
            os.close(pidfd)
    return []


def _is_starting(pid: int) -> bool:
    """Tells whether a worker still imports what the driver does."""
    folder = Path("/proc", str(pid))
    try:
        is_worker = b"--multiprocessing-fork" in (folder / "cmdline").read_bytes()
        return is_worker and (folder / "comm").read_text() != "imported\n"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _semaphores(pid: int) -> set[Path]:
    """Returns the semaphores of a process. Python removes them, unless every process that could is killed."""
    try:
        maps = Path("/proc", str(pid), "maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    # A line of maps: addresses, permissions, offset, device, inode, and a name that the file had only at first.
    inodes = {int(line.split()[4]) for line in maps.splitlines() if "/dev/shm/sem." in line}
    found = set()
    for path in Path("/dev/shm").glob("sem.*"):
        with suppress(FileNotFoundError):
            if path.stat().st_ino in inodes:
                found.add(path)
    return found


class Driver:
    """One conversion in a process group of its own, standing by until `start`. Ended, if need be, by `close`."""

    def __init__(self, script: Path) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - it is open as long as the process is looked after
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
        )
        self.seen: dict[str, float] = {}
        """When each line was read."""
        self._unread = b""

    def __enter__(self) -> Driver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, src: Path, out: Path, workers: int) -> None:
        assert self.process.stdin is not None
        job = json.dumps([str(src), str(out), {**OPTIONS, "workers": workers}])
        with suppress(BrokenPipeError):  # the driver could not even import: its end will tell
            self.process.stdin.write(job.encode() + b"\n")
            self.process.stdin.flush()

    def wait_for(self, line: str | None, seconds: float = PATIENCE_SECONDS) -> bool:
        """Reads until `line` has come, or with None to the end of the output. Returns whether the line did come."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
        while line not in self.seen:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError(f"no {line or 'end'} within {seconds} seconds, only {list(self.seen)}")
            data = os.read(descriptor, 4096)
            if not data:
                return False
            *lines, self._unread = (self._unread + data).split(b"\n")
            for one in lines:
                self.seen.setdefault(one.decode(), time.monotonic())
        return True

    def kill(self, parent_only: bool) -> None:
        # Signals are sent by os.kill, for the methods of Popen would first collect a process that has ended.
        pid = self.process.pid
        semaphores: set[Path] = set()
        if parent_only:
            os.kill(pid, signal.SIGKILL)
        else:
            # The process is stopped first, so that it makes no semaphore between the look and the kill.
            os.kill(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
            semaphores = _semaphores(pid)
            os.killpg(pid, signal.SIGKILL)
            _wait_for_end(pid, PATIENCE_SECONDS)
            for path in semaphores:
                path.unlink(missing_ok=True)
        self.process.wait(PATIENCE_SECONDS)

    def errors(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace").strip()

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_SECONDS)
        for stream in (self.process.stdin, self.process.stdout, self._stderr):
            with suppress(BrokenPipeError):
                if stream is not None:
                    stream.close()


def draw_images(folder: Path, seed: int) -> None:
    """Draws 240 + 48 JPEGs of four classes; three more are bad, and one has to be mended."""
    draw_jpegs(folder, seed, {"train": 240, "val": 48}, 4, (60, 260))
    whole = (folder / "train" / "class0" / "000.jpg").read_bytes()
    (folder / "train" / "class1" / "bad.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "train" / "class2" / "empty.jpg").write_bytes(b"")
    (folder / "val" / "class3" / "page.jpg").write_bytes(b"<html></html>")
    tables = whole.index(b"\xff\xdb")
    (folder / "val" / "class0" / "junk.jpg").write_bytes(whole[:tables] + b"junk" + whole[tables:])


# --- rounds ----------------------------------------------------------------------------------------------------------


class Killer(Rounds[Counts]):
    """Rounds of killing."""

    def __init__(self, images: Path, folder: Path, seed: int, say: Say) -> None:
        super().__init__(folder, seed, say, Counts())
        self.images = images
        self._script = folder / "driver.py"
        self._script.write_text(_DRIVER)
        self._reference = folder / "undisturbed"
        self._expected: dict[str, str] = {}
        self._spans: dict[tuple[int, str], float] = {}
        self._standby = Driver(self._script)
        self._num_outs = 0

    def close(self) -> None:
        self._standby.close()

    def _next_driver(self) -> Driver:
        """The one that stands by, with all imported, while another takes its place."""
        driver, self._standby = self._standby, Driver(self._script)
        driver.wait_for("ready")
        return driver

    def measure(self) -> None:
        """Converts undisturbed, in one process and in several, for the bytes to compare with and the times it takes."""
        for workers in (IN_PROCESS, IN_WORKERS):
            out = self.folder / f"undisturbed-{workers}"
            with self._next_driver() as driver:
                driver.start(self.images, out, workers)
                if not driver.wait_for("done"):
                    raise RuntimeError(f"the undisturbed conversion failed: {driver.errors()}")
                driver.process.wait(PATIENCE_SECONDS)
                seen = driver.seen
                for first, second in (("begin", "work"), ("work", "last"), ("last", "done")):
                    self._spans[workers, first] = seen[second] - seen[first]
            hashes = hash_files(out)
            if not self._expected:
                out.rename(self._reference)
                self._expected = hashes
            elif hashes != self._expected:
                self._violation(f"{workers} workers give other bytes than {IN_PROCESS}")
        report = verify(self._reference)
        if not report.ok:
            self._violation(f"the undisturbed set is not sound: {report.problems}")
        self.say(
            "undisturbed: "
            + ", ".join(f"{name} of {n} workers {s * 1000:.0f} ms" for (n, name), s in self._spans.items())
        )

    def _share_left(self, out: Path) -> float:
        total = sum(bool(re.fullmatch(r".*-\d+\.npy", name)) for name in self._expected)
        return 1 - len(list(out.glob("*-[0-9]*.npy"))) / total

    def kill_once(self, out: Path, workers: int, parent_only: bool, at_once: bool) -> bool:
        """Starts a conversion into `out`, kills it, and checks. Returns whether the set in `out` is complete.

        With `at_once` the same conversion goes on while workers that lost their parent may still be ending.
        """
        counts = self.counts
        counts.rounds += 1
        counts.parent_only += parent_only
        counts.with_workers += workers == IN_WORKERS
        recorded = recorded_shards(out)
        with self._next_driver() as driver:
            moment = self._random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            delay = self._random.random() * self._spans[workers, moment]
            delay *= self._share_left(out) if moment == "work" else 1.2
            driver.start(self.images, out, workers)
            if driver.wait_for(moment):
                time.sleep(delay)
            driver.kill(parent_only)
            self._check_torn(out)  # also while orphans may still be at work
            if at_once:
                self._go_on(out, IN_PROCESS)
            deadline = time.monotonic() + PATIENCE_SECONDS
            while any(map(_is_starting, _group_members(driver.process.pid))) and time.monotonic() < deadline:
                time.sleep(0.05)
            if orphans := _wait_for_end(driver.process.pid, ORPHANS_MAY_LIVE_SECONDS):
                self._violation(f"orphans alive {ORPHANS_MAY_LIVE_SECONDS} s after the kill and their start: {orphans}")
                with suppress(ProcessLookupError):
                    os.killpg(driver.process.pid, signal.SIGKILL)
                _wait_for_end(driver.process.pid, PATIENCE_SECONDS)
            driver.wait_for(None)
            code = driver.process.returncode
            if code not in (0, -signal.SIGKILL):
                self._violation(f"failed by itself, code {code}: {driver.errors()}")
            if code == 0 or "done" in driver.seen:
                counts.after += 1
            elif "last" in driver.seen:
                counts.publishing += 1
            elif "work" in driver.seen:
                counts.during += 1
            else:
                counts.before += 1
        self._check_torn(out)
        if at_once:
            self._check_identical(out)
            return True
        counts.temporary += len(list(out.rglob(".*.tmp")))
        if code == 0 and not (out / "manifest.json").exists():
            self._violation("finished without a manifest")
        now = {name: (out / name).stat().st_ino if (out / name).exists() else None for name in recorded}
        if lost := [name for name in recorded if now[name] != recorded[name]]:
            self._violation(f"finished shards were lost or made again: {lost}")
        return bool(code == 0)

    def _check_torn(self, out: Path) -> None:
        faults = torn_files(out, self._reference)
        self.counts.torn += bool(faults)
        for fault in faults:
            self._violation(fault)

    def _go_on(self, out: Path, workers: int) -> None:
        """Does the same conversion, undisturbed at last."""
        self.counts.resumed += 1
        with self._next_driver() as driver:
            driver.start(self.images, out, workers)
            if not driver.wait_for("done") or driver.process.wait(PATIENCE_SECONDS) != 0:
                self._violation(f"going on failed: {driver.errors()}")

    def _check_identical(self, out: Path) -> None:
        """Checks that all files are those of the undisturbed set, and no others; then removes `out`."""
        if different := different_files(hash_files(out), self._expected):
            self._violation(f"{out} has other files than the undisturbed set: {different}")
            return
        self.counts.identical += 1
        shutil.rmtree(out)

    def run(self, rounds: int) -> None:
        self.measure()
        while self.counts.rounds < rounds:
            out = self.folder / f"out-{self._num_outs}"
            self._num_outs += 1
            for _ in range(min(self._random.randint(1, 4), rounds - self.counts.rounds)):
                done = self.counts.rounds
                # The third and the sixth of eight have worker processes: one goes as a whole, one loses its parent.
                workers = IN_WORKERS if done % 8 in (2, 5) else IN_PROCESS
                complete = self.kill_once(out, workers, parent_only=done % 2 == 1, at_once=done % 16 == 5)
                if self.counts.rounds % 20 == 0:
                    self.say(f"{self.counts.rounds} of {rounds} rounds: {len(self.counts.violations)} violations")
                if complete:
                    break
            if out.exists():
                self._go_on(out, IN_WORKERS if self._num_outs % 8 == 0 else IN_PROCESS)
                self._check_identical(out)


def kill_conversions(
    rounds: int, seed: int = 0, images: Path | None = None, folder: Path | None = None, say: Say = print
) -> Counts:
    """Does so many rounds in `folder`, by default a temporary one. `images` are drawn there if they are not given."""
    with tempfile.TemporaryDirectory(prefix="kill-convert-", dir=folder) as made:
        here = Path(made)
        if images is None:
            images = here / "images"
            draw_images(images, seed)
        killer = Killer(images, here, seed, say)
        try:
            killer.run(rounds)
        finally:
            killer.close()
    return killer.counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "the moments and of the images drawn")
    parser.add_argument("--rounds", type=int, default=500, help="kills; default %(default)s")
    parser.add_argument("--images", type=Path, help="a small image tree to convert; drawn if not given")
    chosen = parser.parse_args(arguments)
    return verdict(kill_conversions(chosen.rounds, chosen.seed, chosen.images, chosen.folder))


if __name__ == "__main__":
    sys.exit(main())
