"""shardio and other programs, run as a user runs them."""

from __future__ import annotations

import os
import subprocess
from typing import Any

from forked import run_forked
from places import CHAOS, ROOT

# A benchmark sees no GPU, even if there is one: so there is one answer to each question.
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def shardio(*words: object, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return run_forked("shardio", *map(str, words), **kwargs)


def assert_one_clear_error(result: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    assert result.returncode == code
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 4  # click's usage line, its hint, an empty line, the error
    for part in parts:
        assert part in result.stderr


def run_python(*words: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Python with the package and tools/chaos/ on its path, warnings being errors.

    torch has one thread: where other tests run beside this one, several would wait for each other, and not by sleeping.
    """
    path = os.pathsep.join([str(ROOT), str(CHAOS), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environ}
    return run_forked(*map(str, words), env=environ, timeout=300)
