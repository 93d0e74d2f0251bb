"""Conditions on samples, as text and together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio.cli.options import parse_share
from shardio.conversion.arrays import ArrayDeclaration
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.reading.shardset import ShardSet, open_shards
from shardio.sets.selection import Condition, Selection, draw_share, parse_condition


@pytest.fixture
def shards(tmp_path: Path) -> ShardSet:
    """Ten samples of three classes, with arrays of numbers: halves (0, 0.5, ... 4.5), tenths, and whether i is odd."""
    arrays: dict[str, ArrayDeclaration] = {
        "half": ("array", "float64", ()),
        "tenth": ("array", "float16", ()),
        "odd": ("array", "bool", ()),
        "big": ("array", "int64", ()),
        "vector": ("array", "float32", (1,)),
    }
    with ShardWriter(tmp_path / "out", (1, 1, 3), classes=["ant", "bee", "cat"], arrays=arrays) as writer:
        for i in range(10):
            values = {"half": i / 2, "tenth": np.float16(i / 10), "odd": i % 2 == 1, "vector": np.zeros(1, np.float32)}
            values["big"] = 2**60 + i
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
        *(({"where": f"odd == {one}"}, [1, 3, 5, 7, 9]) for one in ("1", "1.0", "1e0")),
        ({"where": "odd < 99999999999999999999"}, list(range(10))),
        *(({"where": f"big == {2**60 + 3}{zeros}"}, [3]) for zeros in ("", ".", ".0", ".000")),
        ({"where": ["big >= 1.152921504606846976e18", "big <= 1152921504606846977.00"]}, [0, 1]),
        ({"where": "label > 0.5"}, [1, 2, 4, 5, 7, 8]),
        # float16(0.2) is less than 0.2, and float16(0.3) is more than 0.3.
        ({"where": ["tenth >= 0.2", "tenth <= 0.4", "source_width = 1", "crc32 > 0"]}, [3, 4]),
        ({"classes": "bee"}, [1, 4, 7]),
        ({"classes": ["ant", 2], "keys": "x/*"}, [0, 2, 6, 8]),
        *(({"classes": classes}, [1, 4, 7]) for classes in (1, np.int64(1), np.array([1]), {"bee"})),
        ({"listed": ["y/9", "x/0"], "where": "half > 0"}, [9]),
        ({"indices": [4, 4, 1]}, [4, 4, 1]),
        ({"indices": np.arange(10) % 4 == 3}, [3, 7]),
        ({"classes": "2"}, [2, 5, 8]),
        ({"keys": [b"x/?", "*/3"]}, [0, 2, 3, 4, 6, 8]),
        ({"listed": np.array([b"y/9", b"x/0"])}, [0, 9]),
        ({"random": 0.3, "seed": 1}, [0, 7, 9]),
        ({"random": 0.3, "seed": 2}, [0, 2, 6]),
        ({"random": 0.5, "seed": 1, "classes": "ant"}, [6, 9]),
    ],
)
def test_samples_match_every_condition(shards: ShardSet, conditions: dict[str, Any], expected: list[int]) -> None:
    assert Selection(**conditions).samples(shards.index, shards, shards.numbers).tolist() == expected


@pytest.mark.parametrize(
    ("conditions", "told"),
    [
        *(
            ({"where": text}, "a condition must be NAME")
            for text in ("half", "half >", "> 3", "half >= x", "half >= 1 or 2", "half => 1", "half >= 1e", "")
        ),
        *(({"where": f"{name} > 1"}, rf"half, odd, tenth.*found '{name}'") for name in ("key", "vector", "haf")),
        ({"classes": "bat"}, r"expected a class of the set, or its number from 0 to 2, found 'bat': did you mean cat"),
        ({"classes": 3}, "found 3"),
        ({"classes": "-1"}, "found '-1'"),
        ({"indices": np.ma.array([1])}, "mask"),
        ({"indices": [10]}, "from 0 to 9, found 10 to 10"),
        ({"indices": [-1]}, "from 0 to 9, found -1 to -1"),
        ({"indices": []}, "one-dimensional array of integers or bools, found float64"),
        ({"indices": [[1]]}, "one-dimensional array"),
        ({"indices": [True]}, "expected a mask with 10 values, .*found 1"),
        ({"indices": [1], "classes": "cat"}, "leave the others out"),
        ({"random": 0}, "a fraction of the samples"),
        ({"random": 1.5}, "a fraction of the samples"),
    ],
)
def test_a_selection_of_no_meaning_is_refused(shards: ShardSet, conditions: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Selection(**conditions).samples(shards.index, shards, shards.numbers)


@pytest.mark.parametrize("classes", [1.9, [1.9], [1.0], [None], b"c1", [b"c1"], [[1]]])
def test_a_class_is_a_name_or_an_integer(classes: Any) -> None:
    with pytest.raises(TypeError, match="class"):
        Selection(classes=classes)


def test_a_share_is_the_decimal_number_that_it_is_written_as() -> None:
    for percent in range(1, 101):
        for share in (percent / 100, np.float64(percent / 100), np.float32(percent / 100), parse_share(f"{percent}%")):
            assert len(draw_share(100, share, 0)) == percent
        assert len(draw_share(1000, parse_share(f"{percent / 10}%"), 0)) == percent
        assert len(draw_share(101, percent / 101, 0)) == percent
    assert (len(draw_share(10**6, 2e-6, 0)), len(draw_share(5, 1e-9, 0))) == (2, 1)


def test_conditions_are_one_comparison_with_a_number() -> None:
    assert parse_condition(" year>=2000 ") == Condition("year", ">=", 2000)
    assert parse_condition("score = -1.5e3") == Condition("score", "=", -1500.0)
    assert {type(parse_condition(f"year < {text}").number) for text in ("3", "3.", "3.00")} == {int}
    rows = np.array([((1 << 62) + 1,)], [("label", "<i8")])
    assert not parse_condition(f"label == {1 << 62}").holds(rows, {}).any()  # as integers, and not as floats
    assert parse_condition(f"label < {1 << 70}").holds(rows, {}).all()
    assert not parse_condition("score >= -1e300").holds(rows, {"score": lambda: np.array([np.nan])}).any()
