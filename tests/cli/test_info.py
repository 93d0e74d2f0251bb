"""`shardio info`: what matters of a set on one screen, and the rest on request."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from pictures import random_picture, write_jpeg

import shardio.cli.info as info_module
from shardio.changes.change import change
from shardio.cli.main import cli
from shardio.conversion.convert import convert
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.loading.loader import ShardLoader
from shardio.sets.selection import Selection
from shardio.sets.statistics import ClassCounts
from shardio.sets.storage import FolderStorage


def called(*words: object) -> str:
    result = CliRunner().invoke(cli, list(map(str, words)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_info_fits_a_screen_and_ends_with_what_to_type_next(
    image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(image_tree, tmp_path / "out", size=16)
    monkeypatch.chdir(tmp_path)
    lines = called("info", "out").splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("out: 18 samples, ")
    assert lines[0].endswith(" classes, published")
    assert any(line.startswith("  made by `shardio convert`: crop, bicubic, exact, shuffled, seed 0") for line in lines)
    assert lines[-1] == "next: shardio view out"


def test_the_line_to_copy_makes_a_loader(make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    out = make_set(23)
    monkeypatch.chdir(out.parent)
    (line,) = (line for line in called("info", out.name).splitlines() if line.startswith("  use "))
    with eval(line.removeprefix("  use "), {"ShardLoader": ShardLoader}) as loader:
        assert len(loader) == 1


def test_info_counts_the_classes_of_the_main_split(make_set: Callable[..., Path]) -> None:
    lines = called("info", make_set(23)).splitlines()
    at = lines.index("  classes train has 3 to 4 samples of each, median 3")
    assert [line.split() for line in lines[at + 1 : at + 7]] == [
        *([str(label), f"c{label}", "4" if label < 2 else "3"] for label in range(5)),
        ["and", "2", "more"],
    ]


def test_verbose_info_tells_values_inside_of_lists_one_by_one(image_tree: Path, tmp_path: Path) -> None:
    convert(image_tree, tmp_path / "out", size=16)
    change(tmp_path / "out", tmp_path / "new", keep=Selection(random=0.5))
    text = called("info", tmp_path / "new", "-v")
    assert "  conversions.0.conversion.fit: crop\n" in text
    assert "  conversions.0.conversion.size: 16, 16\n" in text
    assert "{" not in text


def test_long_texts_of_a_set_are_cut(tmp_path: Path) -> None:
    names = ["a" * 10_000, "b"]
    with ShardWriter(tmp_path / "out", (2, 2, 3), classes=names, class_names=["\x1b[2J" * 99, "b"]) as writer:
        for label in range(2):
            writer.append(np.zeros((2, 2, 3), np.uint8), label)
    assert max(map(len, called("info", tmp_path / "out").splitlines()[1:-2])) <= 80


def test_an_index_that_is_no_more_what_was_published_is_told(make_set: Callable[..., Path]) -> None:
    out = make_set(5)
    data = bytearray((out / "train-index.npy").read_bytes())
    data[-1] ^= 1
    (out / "train-index.npy").write_bytes(data)
    assert "  classes not counted: " in called("info", out)


def test_a_large_index_is_not_fetched_from_a_server(
    make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = FolderStorage(make_set(5))
    manifest = storage.load_manifest()
    storage.name = "s3://bucket/set"
    assert isinstance(info_module._counts(storage, manifest), ClassCounts)
    monkeypatch.setattr(info_module, "_MOST_FETCHED_NBYTES", 100)
    assert info_module._counts(storage, manifest) == "not counted: `shardio stats` would read 4.26 kB"
    storage.close()


def test_json_has_no_next_command(make_set: Callable[..., Path]) -> None:
    assert "next" not in json.loads(called("info", make_set(3), "--json"))


@pytest.mark.parametrize(("num_each", "said"), [(1, "1 of each class"), (2, "2 of each class")])
def test_counts_of_one_are_singular_and_equal_counts_are_one(num_each: int, said: str, tmp_path: Path) -> None:
    for number in range(num_each):
        write_jpeg(tmp_path / "src" / "cat" / f"{number}.jpg", random_picture(np.random.default_rng(number), 8, 8))
    source = (tmp_path / "src", "--size", "8", "--accept-layout")
    plan = called("plan", *source)
    assert said in plan
    convert(source[0], tmp_path / "out", size=8, accept_layout=True)
    info = called("info", tmp_path / "out")
    for text in (plan, info):
        assert re.search(r"\b1 class\b", text)
        assert re.search(r"\b1 shard\b", text)
        assert not re.search(r"\b1 (samples|images|shards|classes|workers)\b", text)
    assert f"{num_each} sample{'s' * (num_each > 1)} of each" in info
