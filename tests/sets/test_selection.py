"""Conditions on samples, as text and together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardio.conversion.arrays import ArrayDeclaration
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.reading.shardset import ShardSet, open_shards
from shardio.sets.selection import Selection


@pytest.fixture
def shards(tmp_path: Path) -> ShardSet:
    """Ten samples of three classes, with arrays of numbers: halves (0, 0.5, ... 4.5), tenths, and whether i is odd."""
    arrays: dict[str, ArrayDeclaration] = {
        "half": ("array", "float64", ()),
        "tenth": ("array", "float16", ()),
        "odd": ("array", "bool", ()),
        "vector": ("array", "float32", (1,)),
    }
    with ShardWriter(tmp_path / "out", (1, 1, 3), classes=["a", "b", "c"], arrays=arrays) as writer:
        for i in range(10):
            values = {"half": i / 2, "tenth": np.float16(i / 10), "odd": i % 2 == 1, "vector": np.zeros(1, np.float32)}
            writer.append(np.zeros((1, 1, 3), np.uint8), i % 3, key=f"{'xy'[i % 2]}/{i}", **values)
    return open_shards(tmp_path / "out")


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({"where": "half >= 3"}, [6, 7, 8, 9]),
        ({"where": "half > 3"}, [7, 8, 9]),
        ({"where": ["half <= 1.5", "half != 0.5"]}, [0, 2, 3]),
        ({"where": "half < 1"}, [0, 1]),
        ({"where": " label=2 "}, [2, 5, 8]),
        ({"where": "half == -1e0"}, []),
        ({"where": "odd == 1"}, [1, 3, 5, 7, 9]),
        # float16(0.2) is less than 0.2, and float16(0.3) is more than 0.3.
        ({"where": ["tenth >= 0.2", "tenth <= 0.4", "source_width = 1", "crc32 > 0"]}, [3, 4]),
        ({"classes": "b"}, [1, 4, 7]),
        ({"classes": ["a", 2], "keys": "x/*"}, [0, 2, 6, 8]),
        ({"listed": ["y/9", "x/0"], "where": "half > 0"}, [9]),
        ({"indices": [4, 4, 1]}, [4, 4, 1]),
        ({"indices": np.arange(10) % 4 == 3}, [3, 7]),
        ({"classes": "2"}, [2, 5, 8]),
        ({"keys": [b"x/?", "*/3"]}, [0, 2, 3, 4, 6, 8]),
        ({"listed": np.array([b"y/9", b"x/0"])}, [0, 9]),
    ],
)
def test_samples_match_every_condition(shards: ShardSet, conditions: dict[str, object], expected: list[int]) -> None:
    assert Selection(**conditions).samples(shards.index, shards, shards.numbers).tolist() == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["half", "half >", "> 3", "half >= x", "half >= 1 or 2", "half => 1", "half >= 1e", ""]
)
def test_a_text_that_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a condition must be NAME"):
        Selection(where=[text])


@pytest.mark.parametrize("name", ["key", "vector", "haf"])
def test_other_names_are_refused_with_those_that_there_are(shards: ShardSet, name: str) -> None:
    with pytest.raises(ValueError, match=rf"half, odd, tenth.*found '{name}'"):
        Selection(where=f"{name} > 1").samples(shards.index, shards, shards.numbers)
