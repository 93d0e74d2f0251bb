"""`shardio info`: what matters of a set on one screen, and the rest on request."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command import called
from pictures import random_picture, write_jpeg

import shardio.cli.info as info_module
from shardio.changes.change import change
from shardio.conversion.arrays import ArrayDeclaration
from shardio.conversion.convert import convert
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.loading.loader import ShardLoader
from shardio.sets.index import count_classes, spread_of
from shardio.sets.selection import Selection
from shardio.sets.storage import FolderStorage


def test_info_fits_a_screen_and_ends_with_what_to_type_next(
    image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(image_tree, tmp_path / "out", size=16)
    monkeypatch.chdir(tmp_path)
    lines = called("info", "out").splitlines()
    (use,) = (line.removeprefix("  use ") for line in lines if line.startswith("  use "))
    with eval(use, {"ShardLoader": ShardLoader}) as loader:
        assert len(loader) == 1
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("out: 18 samples, ")
    assert lines[0].endswith(" classes, published")
    assert any(line.startswith("  made by `shardio convert`: crop, bicubic, exact, shuffled, seed 0") for line in lines)
    assert lines[-1] == "next: shardio view out"
    change("out", "new", keep=Selection(random=0.5))
    text = called("info", "new", "-v")  # values inside of lists one by one
    assert "  conversions.0.conversion.fit: crop\n" in text
    assert "  conversions.0.conversion.size: 16, 16\n" in text
    assert "{" not in text


NUMBERS: dict[str, ArrayDeclaration] = {"year": ("array", "int64", ()), "score": ("array", "float64", ())}


@pytest.fixture
def counted(tmp_path: Path) -> Path:
    """train and val with 4, 3, 2, 1 and 0 samples of five classes, with sizes and numbers; one is NaN."""
    classes = [f"c{label}" for label in range(5)]
    with ShardWriter(tmp_path / "out", (2, 2, 3), classes=classes, arrays=NUMBERS) as writer:
        for split in ("train", "val"):
            for i, label in enumerate([0, 0, 0, 0, 1, 1, 1, 2, 2, 3]):
                numbers = {"year": -i, "score": np.nan if i == 5 else float(i)}
                pixels = np.full((2, 2, 3), i, np.uint8)
                writer.append(pixels, label, split=split, key=f"{split}/{i}", source_size=(i + 1, 7), **numbers)
    return tmp_path / "out"


def test_info_counts_the_classes_and_numbers_of_the_main_split(counted: Path) -> None:
    lines = called("info", counted).splitlines()
    at = lines.index("  classes train has 5 classes, 1 of them without a sample")
    assert [line.split() for line in lines[at + 1 : at + 9]] == [
        ["rarest", "c4", "0,", "c3", "1"],
        ["most", "frequent", "c0", "4,", "c1", "3"],
        ["minimum", "median", "maximum", "missing"],
        ["samples", "per", "class", "0", "2", "4"],
        ["source_width", "7", "7", "7"],
        ["source_height", "1", "5.5", "10"],
        ["width", "/", "height", "0.7", "1.283", "7"],
        ["score", "0", "4", "9", "1"],
    ]
    assert lines[at + 9].split() == ["year", "-9", "-4.5", "0"]
    assert lines[at + 10] == "  classes val has 5 classes, 1 of them without a sample"
    facts = json.loads(called("info", counted, "--json"))
    assert facts["splits"]["val"]["samples_of_labels"] == {"0": 4, "1": 3, "2": 2, "3": 1, "4": 0}
    spread = {"minimum": 0.0, "median": 4.0, "maximum": 9.0, "num_missing": 1}
    assert facts["splits"]["val"]["spreads"]["score"] == spread
    assert "next" not in facts


def test_labels_without_classes_are_counted_as_they_are() -> None:
    assert count_classes(np.array([-7, 9, 9]), 0) == [(-7, 1), (9, 2)]
    assert spread_of(np.array([np.nan])) is None


def test_infinities_are_text_in_json(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "out", (2, 2, 3), arrays={"score": NUMBERS["score"]}) as writer:
        for score in (-math.inf, math.inf):
            writer.append(np.zeros((2, 2, 3), np.uint8), 0, score=score)
    text = called("info", tmp_path / "out", "--json")
    facts = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    found = facts["splits"]["train"]["spreads"]["score"]
    assert found == {"minimum": "-inf", "median": "nan", "maximum": "inf", "num_missing": 0}


def test_long_texts_of_a_set_are_cut(tmp_path: Path) -> None:
    names = ["a" * 10_000, "b"]
    with ShardWriter(tmp_path / "out", (2, 2, 3), classes=names, class_names=["\x1b[2J" * 99, "b"]) as writer:
        for label in range(2):
            writer.append(np.zeros((2, 2, 3), np.uint8), label)
    assert max(map(len, called("info", tmp_path / "out").splitlines()[1:-2])) <= 80


def test_a_large_index_is_not_fetched_from_a_server(
    make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = FolderStorage(make_set(5))
    manifest = storage.load_manifest()
    storage.name = "s3://bucket/set"
    monkeypatch.setattr(info_module, "_MOST_FETCHED_NBYTES", 100)
    assert info_module._count(storage, manifest, "train", False).reason.endswith("--verbose reads 4.26 kB")
    assert info_module._count(storage, manifest, "train", True).classes
    storage.close()


@pytest.mark.parametrize(("num_each", "said"), [(1, "1 of each class"), (2, "2 of each class")])
def test_counts_of_one_are_singular_and_equal_counts_are_one(num_each: int, said: str, tmp_path: Path) -> None:
    for number in range(num_each):
        write_jpeg(tmp_path / "src" / "cat" / f"{number}.jpg", random_picture(np.random.default_rng(number), 8, 8))
    source = (tmp_path / "src", "--size", "8", "--labels", "folders")
    plan = called("plan", *source)
    assert said in plan
    convert(source[0], tmp_path / "out", size=8, labels="folders")
    info = called("info", tmp_path / "out")
    for text in (plan, info):
        assert re.search(r"\b1 class\b", text)
        assert re.search(r"\b1 shard\b", text)
        assert not re.search(r"\b1 (samples|images|shards|classes|workers)\b", text)
