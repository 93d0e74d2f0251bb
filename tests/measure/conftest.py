"""Modules of the benchmarks, imported for one test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from places import BENCHMARKS, ROOT


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """module(name): a module of the benchmarks, of the peers, or of the ImageNet example."""
    before = set(sys.modules)
    folders = [BENCHMARKS, BENCHMARKS / "peers", ROOT / "examples" / "imagenet"]
    for folder in folders:
        monkeypatch.syspath_prepend(folder)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(tuple(map(str, folders))):
            del sys.modules[name]
