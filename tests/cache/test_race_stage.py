"""Processes that stage, read and evict at once, and are killed: a short form of race_stage.py, and its own test.

It forks, and so is run in a process that has no other threads.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command import printed_by
from places import CHAOS


def test_processes_that_stage_and_evict_at_once_make_one_copy_and_lose_none(tmp_path: Path) -> None:
    words = ("--rounds", "6", "--processes", "10", "--seed", "1", "--folder", tmp_path)
    printed = printed_by(CHAOS / "race_stage.py", *words)
    assert printed.endswith("\n6 rounds of staging, 6 of eviction, 0 violations\n")
    counts = {
        word: int(number)
        for number, word in re.findall(r"(\d+) (files copied|processes served|killed|copies evicted)", printed)
    }
    assert len(counts) == 4
    assert all(counts.values())
    assert not list(tmp_path.iterdir())


CARELESS = """
import os, pathlib, sys
import race_stage
import fcntl, time
from shardio.cache import folder, leases, partial_copy
from shardio.system import files, opening
from shardio.cache import filler as filling
from shardio.cache import stage as staging
{fault}
counts = race_stage.race_stagings({rounds}, 16, seed=3, say=lambda line: None, until_noticed={noticed!r})
print("".join(text + "\\n" for text in counts.violations))
"""
EVICTION_WITHOUT_LOCKS = """
leases.CopyPaths.lock_alone = lambda self: opening.open_file(os.devnull, os.O_RDONLY)
"""
LOCKS_OF_FILES_THAT_ARE_GONE = """
def take(paths):
    lock = paths.open_lock()
    time.sleep(0.01)  # or it would take more rounds
    fcntl.flock(lock.fileno(), fcntl.LOCK_SH)
    return lock
leases._lock_shared = take
"""
TWO_WHO_FILL = """
leases.Lease.try_filling = lambda self, source: opening.open_file(os.devnull, os.O_RDONLY)
"""
NAMED_TOO_EARLY = "partial_copy.part_of = lambda folder, entry: folder / entry.file"


@pytest.mark.parametrize(
    ("fault", "noticed"),
    [
        (EVICTION_WITHOUT_LOCKS, "a process ended with"),
        (LOCKS_OF_FILES_THAT_ARE_GONE, "a process ended with"),
        (TWO_WHO_FILL, "the copy was completed|a process ended with"),
        (NAMED_TOO_EARLY, "the copy has other bytes than the source"),
        ("filling.remove_parts = lambda folder: None", "left after the next start: .*blocks"),
        ("folder._remove_trash = lambda path: None", "left when all could be evicted: .*evicted"),
        ("leases.CopyPaths.remove_locks = lambda self: None", "left when all could be evicted: .*lock"),
    ],
    ids=[
        *("eviction without locks", "locks of files that are gone", "two who fill", "named too early"),
        *("temporary files kept", "evicted files kept", "locks kept"),
    ],
)
def test_a_cache_that_is_not_careful_is_noticed(fault: str, noticed: str) -> None:
    # Processes must meet, or be killed, at the right moment: that takes a few rounds, and by chance many.
    printed = printed_by("-c", CARELESS.format(fault=fault, rounds=48, noticed=noticed))
    assert re.search(noticed, printed), printed
    # These errors would be mistakes in the code of the fault.
    assert not re.search("AttributeError|NameError|TypeError", printed), printed
