"""Options check themselves before a set is looked for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio.loading.loader import ShardLoader
from shardio.loading.options import Options

USUAL = Options(
    seed=0,
    prefetch=2,
    num_threads=None,
    io="auto",
    check="off",
    on_damage="raise",
    transform=None,
)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"io": "fast"}, "io must be one of auto, mmap, pread, direct; found 'fast'"),
        ({"check": "all"}, "check must be one of off, sample; found 'all'"),
        ({"on_damage": "ignore"}, "on_damage must be one of raise, skip; found 'ignore'"),
        ({"num_threads": 0}, "num_threads must be at least 1 and prefetch at least 0; found 0, 2"),
        ({"prefetch": -1}, "num_threads must be at least 1 and prefetch at least 0; found None, -1"),
    ],
)
def test_what_cannot_be_is_refused_before_a_set_is_looked_for(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardLoader(Path("there is no set here"), 4, device="cpu", **option)


def test_integers_of_any_kind_become_those_of_python() -> None:
    options = dataclasses.replace(USUAL, seed=np.uint64(3), prefetch=np.int8(1), num_threads=np.int64(2))
    assert [type(value) for value in (options.seed, options.prefetch, options.num_threads)] == [int] * 3
