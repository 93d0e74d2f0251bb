"""The reader in NumPy on the page of the format finds what shardio finds, in sets of every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents import code_blocks
from halved import make_halved_set
from places import DATA, ROOT

from shardio.changes.change import change
from shardio.conversion.writing.set_writer import LabelType, ShardWriter
from shardio.format.manifest_file import load_manifest
from shardio.reading.shardset import open_shards
from shardio.sets.selection import Selection


@pytest.fixture(scope="module")
def split_class() -> Any:
    _, block = code_blocks((ROOT / "docs" / "format.md").read_text(encoding="utf-8"), "python")
    assert sum(1 for line in block.splitlines() if line) <= 52
    names: dict[str, Any] = {}
    exec(block, names)
    return names["Split"]


def golden(name: str) -> Callable[[Path], list[Path]]:
    return lambda folder: [DATA / name]


def several_splits(folder: Path) -> list[Path]:
    with ShardWriter(folder / "set", (2, 3, 3), shard_nbytes=4096 + 2 * 18) as writer:
        for i in range(8):
            writer.append(np.full((2, 3, 3), i, np.uint8), i, key=str(i), split="train" if i < 5 else "val")
    return [folder / "set"]


def shared_shards(folder: Path) -> list[Path]:
    """A set and two sets made from it, which have its shards and orders of their own."""
    (old,) = several_splits(folder)
    for name, number in (("few", 2), ("others", 3)):
        change(old, folder / name, keep=Selection(where=f"label >= {number}"))
    return [old, folder / "few", folder / "others"]


def labeled(labels: LabelType) -> Callable[[Path], list[Path]]:
    def write(folder: Path) -> list[Path]:
        with ShardWriter(folder / "set", (2, 3, 3), labels=labels) as writer:
            for i in range(3):
                writer.append(np.full((2, 3, 3), i, np.uint8), None if labels is None else i / 2, key=str(i))
        return [folder / "set"]

    return write


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(golden("golden"), id="integer labels"),
        pytest.param(golden("golden-arrays"), id="arrays and an order"),
        pytest.param(golden("golden-latents"), id="vectors as labels, no pixels"),
        pytest.param(labeled("float32"), id="numbers as labels"),
        pytest.param(labeled(None), id="no labels"),
        pytest.param(several_splits, id="several splits"),
        pytest.param(shared_shards, id="shared shards"),
        pytest.param(lambda folder: [make_halved_set(folder / "set", 8, 3)], id="yuv420"),
    ],
)
def test_the_reader_finds_what_shardio_finds(
    make: Callable[[Path], list[Path]], split_class: Any, tmp_path: Path
) -> None:
    for folder in make(tmp_path):
        for name in load_manifest(folder).splits:
            shards, split = open_shards(folder, name), split_class(folder, name)
            assert len(split.index) == len(shards)
            assert set(split.parts) == {*shards.arrays, *(["pixels"] if shards.has_pixels else [])}
            for number in range(len(shards)):
                sample = np.array([number])
                assert split.index["key"][number] == shards.column_of("key", sample)[0]
                if shards.has_pixels:
                    np.testing.assert_array_equal(split.value("pixels", number), shards.image_of(number))
                for array in shards.arrays:
                    np.testing.assert_array_equal(split.value(array, number), shards.values_of(array, sample)[0])
                expected = shards[number].label
                np.testing.assert_array_equal(split.label(number), expected)


def test_the_reader_refuses_a_row_that_does_not_exist(split_class: Any) -> None:
    split = split_class(DATA / "golden-arrays")
    for row in (-1, 3):
        split.orders = [np.array([row])]
        with pytest.raises(AssertionError):
            split.value("pixels", 0)
