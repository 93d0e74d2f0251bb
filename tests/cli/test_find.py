"""Choosing samples: by the same words in `find`, `view`, `extract` and `change`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import call

from shardio.conversion.writing.set_writer import ShardWriter
from shardio.reading.shardset import open_shards

HOSTILE = os.fsencode("x\n\x1b[31m") + b"\xff.png"


def lines(*words: object) -> list[list[str]]:
    result = call(*words)
    assert result.exit_code == 0, result.output
    return [line.split() for line in result.stdout.splitlines()]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """train and val with three classes, two of which have one name for people; years; a hostile key."""
    options: dict[str, Any] = {"classes": ["n1", "n2", "n3"], "class_names": ["crane", "tench", "crane"]}
    options["arrays"] = {"year": ("array", "int64", ())}
    with ShardWriter(tmp_path / "out", (2, 2, 3), **options) as writer:
        for split, count in (("train", 12), ("val", 3)):
            for i in range(count):
                key = HOSTILE if (split, i) == ("train", 4) else f"{split}/{i}.png"
                options = {"key": key, "source_size": (10 + i, 20 + i), "year": 2000 + i}
                writer.append(np.full((2, 2, 3), i, np.uint8), i % 3, split=split, **options)
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--class", "tench", "--split", "train"], [1, 4, 7, 10]),
        (["--class", "crane", "--split", "val"], [0, 2]),
        (["--class", "n1", "--class", "1", "--split", "val"], [0, 1]),
        (["--key", "*/1?.png"], [10, 11]),
        (["--class", "n2", "--key", "*/1*", "--where", "year != 2001", "--split", "train"], [10]),
    ],
)
def test_find_view_and_change_choose_the_same_samples(
    out: Path, tmp_path: Path, words: list[str], expected: list[int]
) -> None:
    *found, count, following = lines("find", out, *words)
    assert [int(line[-3]) for line in found] == expected
    assert count[0] == str(len(expected))
    assert following[:3] == ["next:", "shardio", "view"]
    facts = json.loads(call("find", out, *words, "--json").stdout)
    assert [sample["index"] for sample in facts["samples"]] == expected
    split = facts["samples"][0]["split"]
    if "--split" not in words:
        words = [*words, "--split", split]
    made = json.loads(call("change", out, tmp_path / "new", "--keep", *words, "--json").stdout)
    assert made["num_samples"][split] == len(expected)
    chosen = open_shards(tmp_path / "new", split).index["key"]
    np.testing.assert_array_equal(chosen, open_shards(out, split).index["key"][expected])
    result = call("view", out, *words, "--count", "99", "-o", tmp_path / "sheet.png")
    assert result.exit_code == 0, result.output


def test_find_suggests_no_view_of_a_url(out: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").put(f"{out}/", "/found/", recursive=True)
    assert lines("find", "memory://found", "--class", "n2")[-1] == ["5", "of", "15", "samples"]


def test_change_takes_numbers_as_view_does(out: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "some.npy", [5, 3])
    for number, given in enumerate(("5,3", tmp_path / "some.npy")):
        new = tmp_path / str(number)
        assert call("change", out, new, "--keep", "--indices", given, "--split", "train").exit_code == 0
        assert [sample.image[0, 0, 0] for sample in open_shards(new)] == [5, 3]
        assert call("view", out, "--indices", given, "-o", tmp_path / "sheet.png").exit_code == 0


def test_all_samples_are_found_in_pieces(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.cli.find._CHUNK", 4)
    assert len(lines("find", out)) == 15 + 2
    facts = json.loads(call("find", out, "--json").stdout)
    everywhere = [*(("train", i) for i in range(12)), *(("val", i) for i in range(3))]
    assert [(sample["split"], sample["index"]) for sample in facts["samples"]] == everywhere
    assert facts["num_samples"] == 15


def test_a_hostile_key_is_one_visible_line_and_exact_in_json(out: Path) -> None:
    result = call("find", out, "--where", "year == 2004")
    assert result.stdout.splitlines()[0] == "train  4  tench  x\\n\\x1b[31m\\udcff.png"
    (sample,) = json.loads(call("find", out, "--where", "year == 2004", "--json").stdout)["samples"]
    assert os.fsencode(sample["key"]) == HOSTILE


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["--class", "tenhc"], 1, "number from 0 to 2, found 'tenhc': did you mean"),
        (["--where", "yaer > 1"], 1, "found 'yaer': did you mean year?"),
        (["--where", "year"], 1, "a condition must be NAME"),
        (["--split", "tran"], 1, "expected a split 'tran', found train, val: did you mean train?"),
        (["--key", "9.png"], 0, "no key matches '9.png' (* stands for anything): did you mean train/9.png?"),
        (["--key", "train/99.pgn"], 0, "stands for anything): did you mean train/9.png"),
        (["--key", "q"], 0, "a key is train/0.png"),
        (["--key", "*9*", "--class", "tench"], 0, "no sample matches"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(out: Path, words: list[str], code: int, part: str) -> None:
    result: Any = call("find", out, *words)
    assert bool(result.exit_code) == bool(code)
    assert part in result.output + str(result.exception)
