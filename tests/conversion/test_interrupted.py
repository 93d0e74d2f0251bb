"""Conversions that are killed, fail and compete: short forms of the long attacks in tools/chaos.

Those that fork are run in a process of their own, which has no other threads.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import kill_convert as tool
import numpy as np
import pytest
from command import printed_by
from folders import flip, put
from pictures import random_picture, write_jpeg
from places import CHAOS

from shardio.conversion.convert import convert


def test_kills_at_random_moments_tear_nothing_and_lose_nothing(tmp_path: Path) -> None:
    counts = tool.kill_conversions(3, seed=1, folder=tmp_path)
    assert not counts.violations, "seed 1:\n" + "\n".join(counts.violations)
    assert counts.before + counts.during + counts.publishing + counts.after == 3
    assert counts.during + counts.publishing > 0
    assert counts.with_workers == 1
    assert counts.parent_only == 1
    assert counts.identical == counts.resumed > 0
    assert not list(tmp_path.iterdir())


def numbers_in(line: str) -> dict[str, int]:
    """Returns the numbers of a line such as "80 points, 0 torn", by their words."""
    return {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", line)}


def test_failures_at_any_call_to_the_disk_tear_nothing_and_lose_nothing(tmp_path: Path) -> None:
    printed = printed_by(CHAOS / "fail_convert.py", "--points", "12", "--seed", "1", "--folder", tmp_path)
    numbers = numbers_in(printed.splitlines()[-1])
    assert numbers.pop("points") >= 12
    assert numbers == {"torn": 0, "lost": 0, "aborts": 0, "hangs": 0, "other": 0}
    assert not list(tmp_path.iterdir())


def test_competing_conversions_make_one_set_or_none(tmp_path: Path) -> None:
    printed = printed_by(CHAOS / "race_convert.py", "--rounds", "4", "--seed", "1", "--folder", tmp_path)
    numbers = numbers_in(printed.splitlines()[-1])
    assert numbers == {"rounds": 4, "torn": 0, "mixed": 0, "hangs": 0, "violations": 0}
    assert not list(tmp_path.iterdir())


# --- the tools would notice -------------------------------------------------------------------------------------------

# Which calls there are depends on the threads' timing. A kill leaves something to sweep at one point of four: with 60
# points, there is no such point among them once in 10 million runs. The other faults are seen at most points. The first
# point at which the fault is seen is enough.
FAIL = """
import os, sys
import fail_convert
from shardio.conversion import claim, convert
from shardio.system import files
{fault}
class Enough(Exception): pass
def do_jobs(jobs, failer, *_):
    for job in jobs:
        failer.do(job)
        if getattr(failer.counts, {kind!r}):
            break
    counts = failer.counts
    print(counts.torn, counts.lost, counts.aborts + counts.hangs, counts.other)
    raise Enough
fail_convert.do_jobs = do_jobs
try:
    fail_convert.fail_conversions({points}, seed=2, only={only!r}, say=lambda line: None)
except Enough:
    pass
"""
NO_FSYNC = """
def commit(self, *, replace=True):
    if replace:
        os.rename(self.temporary, self.path)
    else:
        os.link(self.temporary, self.path)
        os.unlink(self.temporary)
    self._is_temporary = False
    self._file.close()
    files.fsync_folder(self.path.parent)
files.AtomicFile.commit = commit
"""
NO_SWEEP = """
for name in ("sweep_temporaries", "remove_temporaries"):
    setattr(claim, name, lambda folder: 0)
"""


@pytest.mark.parametrize(
    ("fault", "only", "kind", "points"),
    [
        (NO_FSYNC, "power", "torn", 12),
        ("files.fsync_folder = lambda folder: None", "power", "lost", 20),
        (NO_SWEEP, "kill halfway", "other", 60),
        ("convert.load_records = lambda tasks: {}", "kill", "lost", 20),
    ],
    ids=["content not synced", "names not synced", "nothing swept", "finished shards made again"],
)
def test_a_converter_that_is_not_careful_is_noticed(fault: str, only: str, kind: str, points: int) -> None:
    printed = printed_by("-c", FAIL.format(fault=fault, only=only, points=points, kind=kind))
    found = dict(zip(("torn", "lost", "broken", "other"), map(int, printed.split()), strict=True))
    assert found[kind] > 0, found
    assert found["broken"] == 0, found


def test_conversions_that_go_on_with_anothers_work_are_noticed() -> None:
    script = """
import race_convert
from shardio.conversion import claim
claim.difference = lambda there, here: ""
print(len(race_convert.race_conversions(6, seed=1, say=lambda line: None).violations))
"""
    assert int(printed_by("-c", script)) > 0


# --- what is torn ----------------------------------------------------------------------------------------------------

SHARD = "train-00001.npy"
SPOILS: dict[str, Callable[[Path], object]] = {
    f"{SHARD}: NumPy cannot open it": lambda out: os.truncate(out / SHARD, 4863),
    f"{SHARD}: its header implies 4864 bytes, found 4865": lambda out: os.truncate(out / SHARD, 4865),
    f"{SHARD}: differs from the undisturbed one": lambda out: flip(out / SHARD),
    "train-index.npy: differs from the undisturbed one": lambda out: flip(out / "train-index.npy"),
    "train-00002.npy: not a file of the finished set": lambda out: shutil.copy(out / SHARD, out / "train-00002.npy"),
    "published, but ": lambda out: (out / SHARD).unlink(),
}


def test_torn_and_left_over_files_are_noticed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(8):
        write_jpeg(tmp_path / "src" / "a" / f"{number}.jpg", random_picture(rng, 20, 20))
    for name in ("one", "two"):
        convert(tmp_path / "src", tmp_path / name, size=8, shard_size=4096 + 4 * 192, workers=1, labels="folders")
    assert tool.torn_files(tmp_path / "one", tmp_path / "two") == []
    for number, (fault, spoil) in enumerate(SPOILS.items()):
        out = Path(shutil.copytree(tmp_path / "one", tmp_path / f"{number}"))
        spoil(out)
        faults = tool.torn_files(out, tmp_path / "two")
        assert any(one.startswith(fault) for one in faults), faults
    for left in (".convert/", ".x.tmp"):
        out = Path(shutil.copytree(tmp_path / "one", tmp_path / f"with {left}"))
        put(out, left)
        assert tool.hash_files(out) != tool.hash_files(tmp_path / "two")
