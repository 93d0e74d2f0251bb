"""Worker processes that start quickly."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace

import pytest

from shardio.conversion.engines import processes


@pytest.fixture(autouse=True)
def workers_that_have_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks workers from the process that has torch imported (tests/support/forked.py), where spawned ones would import
    it. They do not inherit anything either. Commands and scripts spawn theirs, and so do the tests of storms."""
    quick = multiprocessing.get_context("forkserver")
    stand_in = SimpleNamespace(get_context=lambda name: quick, Pipe=multiprocessing.Pipe)
    monkeypatch.setattr(processes, "multiprocessing", stand_in)
