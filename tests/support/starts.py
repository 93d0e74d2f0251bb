"""Starts of training scripts, by killed.py: one process imports torch, and forks the ranks of each start."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from killed import TIMEOUT_SECONDS
from places import ROOT, SUPPORT

# The processes of a test share this machine, and must not share a GPU. Sums depend on the number of threads.
SETTINGS = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "STOP_AFTER": "0"}
SETTINGS |= {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}


def needs(package: str) -> None:
    """Skips a test of scripts that use a package which is not installed. Imports nothing: that takes seconds."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


class Starts:
    """Runs scripts, one after the other."""

    def __init__(self, process: subprocess.Popen[str], said: Path) -> None:
        self._process = process
        self._said = said

    def run(
        self,
        script: Path,
        *words: str | Path,
        folder: Path,
        ranks: int = 0,
        kill: tuple[int | None, int] | None = None,
        kept: Path | None = None,
        term: Path | None = None,
        **environ: str,
    ) -> list[int]:
        """Returns the exit codes of `ranks` processes, or of one without the variables of a launcher.

        See killed.py for `kill`, `kept` and `term`.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._said.write_bytes(b"")  # each process appends
        start = {"script": str(script), "words": list(map(str, words)), "folder": str(folder), "ranks": ranks}
        start |= {"kill": kill, "kept": kept and str(kept), "term": term and str(term), "environ": environ}
        self._process.stdin.write(json.dumps(start) + "\n")
        codes: list[int] = json.loads(self._process.stdout.readline())
        return codes

    def said(self) -> str:
        """Returns what the processes of the last start have printed."""
        return self._said.read_text(errors="replace")


@contextlib.contextmanager
def starting(said: Path) -> Iterator[Starts]:
    """A process that starts scripts, whose output goes to the file `said`. It imports what they need once."""
    with said.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, str(SUPPORT / "killed.py")],
            env={**os.environ, **SETTINGS},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            bufsize=1,
        )
    try:
        yield Starts(process, said)
    finally:
        process.communicate(timeout=TIMEOUT_SECONDS)  # the end of stdin is that of the process
