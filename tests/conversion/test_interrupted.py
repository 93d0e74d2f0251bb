"""Conversions that are killed, fail and compete: short forms of the long attacks in tools/chaos.

Those that fork are run in a process of their own, which has no other threads.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import kill_convert as tool
import numpy as np
import pytest
from command import run_python
from pictures import random_picture, write_jpeg
from places import CHAOS


def test_kills_at_random_moments_tear_nothing_and_lose_nothing(tmp_path: Path) -> None:
    counts = tool.kill_conversions(3, seed=1, folder=tmp_path)
    assert not counts.violations, "seed 1:\n" + "\n".join(counts.violations)
    assert counts.rounds == 3
    assert counts.before + counts.during + counts.publishing + counts.after == 3
    assert counts.during + counts.publishing > 0
    assert counts.with_workers == 1
    assert counts.parent_only == 1
    assert counts.torn == 0
    assert counts.identical == counts.resumed > 0
    assert not list(tmp_path.iterdir())


def numbers_in(line: str) -> dict[str, int]:
    """Returns the numbers of a line such as "80 points, 0 torn", by their words."""
    return {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", line)}


def test_failures_at_any_call_to_the_disk_tear_nothing_and_lose_nothing(tmp_path: Path) -> None:
    result = run_python(CHAOS / "fail_convert.py", "--points", "12", "--seed", "1", "--folder", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    numbers = numbers_in(result.stdout.splitlines()[-1])
    assert numbers.pop("points") >= 12
    assert numbers == {"torn": 0, "lost": 0, "aborts": 0, "hangs": 0, "other": 0}
    assert not list(tmp_path.iterdir())


def test_competing_conversions_make_one_set_or_none(tmp_path: Path) -> None:
    result = run_python(CHAOS / "race_convert.py", "--rounds", "4", "--seed", "1", "--folder", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    numbers = numbers_in(result.stdout.splitlines()[-1])
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
    result = run_python("-c", FAIL.format(fault=fault, only=only, points=points, kind=kind))
    assert result.returncode == 0, result.stderr
    found = dict(zip(("torn", "lost", "broken", "other"), map(int, result.stdout.split()), strict=True))
    assert found[kind] > 0, found
    assert found["broken"] == 0, found


def test_conversions_that_go_on_with_anothers_work_are_noticed() -> None:
    script = """
import race_convert
from shardio.conversion import claim
claim.difference = lambda there, here: ""
print(len(race_convert.race_conversions(6, seed=1, say=lambda line: None).violations))
"""
    result = run_python("-c", script)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 0


def test_files_of_two_sets_and_torn_files_are_noticed(tmp_path: Path) -> None:
    script = """
import pathlib, shutil, sys
import race_convert as tool
here = pathlib.Path(sys.argv[1])
tool.draw_images(here / "images", 0)
race = tool.Race(here / "images", here, 0, lambda line: None)
one, two = (here / f"undisturbed-{seed}" for seed in tool.SEEDS)
out = here / "out"
out.mkdir()
shutil.copy(one / "train-00000.npy", out)
race._check_moment(out)
print(race.counts.mixed, race.counts.torn)
shutil.copy(two / "train-00001.npy", out)
race._check_moment(out)
print(race.counts.mixed, race.counts.torn)
(out / "train-00001.npy").write_bytes((one / "train-00001.npy").read_bytes()[:-1])
race._check_moment(out)
print(race.counts.mixed, race.counts.torn)
"""
    result = run_python("-c", script, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["0 0", "1 0", "1 1"]


# --- what is torn ----------------------------------------------------------------------------------------------------


@pytest.fixture
def sets(tmp_path: Path) -> tuple[Path, Path]:
    """Two equal published sets."""
    from shardio.conversion.convert import convert

    rng = np.random.default_rng(0)
    for number in range(8):
        write_jpeg(tmp_path / "src" / "a" / f"{number}.jpg", random_picture(rng, 20, 20))
    for name in ("one", "two"):
        convert(tmp_path / "src", tmp_path / name, size=8, shard_size=4096 + 4 * 192, workers=1, labels="folders")
    return tmp_path / "one", tmp_path / "two"


def spoil(out: Path, how: str) -> None:
    shard = out / "train-00001.npy"
    data = shard.read_bytes()
    match how:
        case "short":
            shard.write_bytes(data[:-1])
        case "long":
            shard.write_bytes(data + b"\0")
        case "changed":
            shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "changed index":
            index = out / "train-index.npy"
            index.write_bytes(index.read_bytes()[:-1] + b"\xff")
        case "stranger":
            (out / "train-00002.npy").write_bytes(data)
        case _:
            shard.unlink()


def test_torn_files_are_noticed(sets: tuple[Path, Path], tmp_path: Path) -> None:
    assert tool.torn_files(*sets) == []
    for how, fault in {
        "short": "train-00001.npy: NumPy cannot open it",
        "long": "train-00001.npy: its header implies 4864 bytes, found 4865",
        "changed": "train-00001.npy: differs from the undisturbed one",
        "changed index": "train-index.npy: differs from the undisturbed one",
        "stranger": "train-00002.npy: not a file of the finished set",
        "lost shard": "published, but ",
    }.items():
        out = shutil.copytree(sets[0], tmp_path / how)
        spoil(out, how)
        faults = tool.torn_files(out, sets[1])
        assert any(one.startswith(fault) for one in faults), faults


def test_temporary_files_and_work_folders_left_over_are_noticed(sets: tuple[Path, Path]) -> None:
    out, expected = sets[0], tool.hash_files(sets[1])
    assert tool.hash_files(out) == expected
    (out / ".convert").mkdir()
    assert tool.hash_files(out) != expected
    (out / ".convert").rmdir()
    (out / ".x.tmp").write_bytes(b"")
    assert tool.hash_files(out) != expected
