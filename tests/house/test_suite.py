"""The suite itself: no GPU is passed over, and a file in /dev/shm is blamed on the test that left it."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import run_forked
from deadlines import must_not_block
from environment import why_gpus_are_not_tested
from leaks import shared_names, shared_names_left
from places import ROOT


@pytest.fixture
def made_up_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'GPU 0: Made up'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.usefixtures("made_up_gpu")
def test_a_gpu_that_torch_does_not_see_fails_the_tests() -> None:
    code = "import sys, pytest; sys.exit(pytest.main(['-p', 'no:cacheprovider', '--collect-only', '-q', sys.argv[1]]))"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}  # torch sees none, where there are any
    run = run_forked("-c", code, __file__, cwd=ROOT, env=env, timeout=300)
    said = run.stdout + run.stderr
    assert run.returncode == 1, said
    assert "nvidia-smi lists GPU 0: Made up" in said
    assert "test_a_gpu" not in said


def test_tests_of_a_gpu_are_collected_without_simplejpeg() -> None:
    code = """if True:
        import sys, pytest
        sys.modules["simplejpeg"] = None
        sys.exit(pytest.main(["-p", "no:cacheprovider", "--collect-only", "-q", "-m", "gpu", *sys.argv[1:]]))
    """
    names = [str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8")]
    run = run_forked("-c", code, *names, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "test_every_byte" in run.stdout


@pytest.mark.usefixtures("made_up_gpu")
def test_gpus_that_were_hidden_on_purpose_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert why_gpus_are_not_tested() is None


# --- /dev/shm ---------------------------------------------------------------------------------------------------------

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
