"""`shardio demo --elastic`: a training that is killed and resumed on other ranks, with the batches of one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import assert_one_clear_error, run_python, shardio
from kill_train import MARK, marked_processes

SHORT = ("demo", "--elastic", "--steps", "9", "--size", "16")


@pytest.fixture
def tmp() -> Iterator[Path]:
    """TMPDIR of a demo. Its name is short: it gets a socket, whose path has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_killed_and_resumed_ranks_read_the_batches_of_one_process(tmp: Path) -> None:
    result = shardio(*SHORT, env={**os.environ, "TMPDIR": str(tmp)})
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    said = result.stdout.splitlines()
    assert said[3:9] == [
        "  1 process, uninterrupted: steps 1 to 9",
        "  4 ranks of 15 samples: steps 1 to 5, then killed",
        "  3 ranks of 20 samples: steps 5 to 8, then killed",
        "  5 ranks of 12 samples: steps 8 to 9",
        "all 11 global batches are bit-equal to the uninterrupted run's: pixels, labels, order",
        "  9 steps, and 2 repeated: they came after the last saved state",
    ]
    assert not list(tmp.iterdir())


CHANGED = """
from shardio.cli import elastic
from shardio.cli.main import main

def batches(run):
    for step in range(FIRST[run.world_size], run.last + 1):
        changed = (run.world_size, step) == CHANGED
        yield step, [bytes([step, sample + (changed and sample == 59)]) for sample in range(60)]

elastic._global_batches = batches
main()
"""


@pytest.mark.parametrize(
    ("first", "changed", "words"),
    [
        ({1: 1, 4: 1, 3: 5, 5: 8}, (3, 6), "step 6 on 3 ranks"),
        ({1: 1, 4: 1, 3: 7, 5: 8}, None, "skipped"),
    ],
)
def test_a_difference_is_an_error(first: dict[int, int], changed: object, words: str, tmp_path: Path) -> None:
    script = CHANGED.replace("FIRST", repr(first)).replace("CHANGED", repr(changed))
    result = run_python("-c", script, *SHORT, TMPDIR=str(tmp_path))
    assert result.returncode == 1
    assert words in result.stderr
    assert "bit-equal" not in result.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_interrupted_or_killed_demo_leaves_no_processes(sent: signal.Signals, code: int, tmp: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp), MARK: str(tmp)}
    demo = subprocess.Popen(
        [sys.executable, "-m", "shardio", "demo", "--elastic", "--size", "16"],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        # The four ranks have saved a state, and seconds are left.
        while not list(tmp.glob("*/pieces/state.pt")) and demo.poll() is None:
            time.sleep(0.01)
        assert marked_processes(tmp)
        # As a terminal sends Ctrl-C: to all processes.
        os.killpg(demo.pid, sent) if sent == signal.SIGINT else demo.kill()
        _, stderr = demo.communicate(timeout=30)
        assert demo.returncode == code
        deadline = time.monotonic() + 20
        while marked_processes(tmp) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not marked_processes(tmp)
    finally:
        for pid in marked_processes(tmp):
            os.kill(pid, signal.SIGKILL)
    if sent == signal.SIGINT:
        assert stderr.strip() == "shardio: interrupted"
        assert not list(tmp.iterdir())


def test_a_demo_takes_images_or_draws_them(tmp_path: Path) -> None:
    assert_one_clear_error(shardio("demo"), 2, "neither")
    assert_one_clear_error(shardio("demo", tmp_path, "--elastic"), 2, "both")
