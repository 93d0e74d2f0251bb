"""The suite's own check of /dev/shm blames a test for some files, and not for others."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from deadlines import must_not_block
from leaks import shared_names, shared_names_left

# Makes the file, maps it, and lives for as long as its stdin does. An orphan's parent has ended.
MAP = """
import mmap, os, sys
if sys.argv[2:] == ["orphan"] and os.fork():
    os._exit(0)
with open(sys.argv[1], "w+b") as file:
    file.write(bytes(8))
    file.flush()
    mapping = mmap.mmap(file.fileno(), 8)
print("mapped", flush=True)
sys.stdin.read()
print("ends", flush=True)
"""


@pytest.fixture
def path() -> Iterator[Path]:
    path = Path("/dev/shm", f"shardio-test-{uuid.uuid4()}")
    yield path
    path.unlink()


@pytest.mark.parametrize(("words", "blamed"), [([], True), (["orphan"], False)])
def test_a_name_that_a_process_has_mapped_belongs_to_that_process(words: list[str], blamed: bool, path: Path) -> None:
    before = shared_names()
    command = [sys.executable, "-c", MAP, str(path), *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "mapped\n"
        assert (path.name in shared_names_left(before)) == blamed
        process.stdin.close()
        assert process.stdout.read() == "ends\n"
    with must_not_block():  # an orphan ends a moment after its last line
        while path.name not in shared_names_left(before):
            os.sched_yield()


def test_a_name_that_no_process_has_mapped_is_blamed_on_the_test(path: Path) -> None:
    before = shared_names()
    path.write_bytes(b"")
    assert path.name in shared_names_left(before)
    assert path.name not in shared_names_left(before | {path.name})
