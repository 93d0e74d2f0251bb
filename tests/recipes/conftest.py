"""Starts of training scripts: tests/support/starts.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starts import Starts, starting


@pytest.fixture(scope="session")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starts]:
    with starting(tmp_path_factory.mktemp("starts") / "said") as starts:
        yield starts
