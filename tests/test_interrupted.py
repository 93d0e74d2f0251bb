"""Conversions killed at random moments: a short form of what tools/kill_convert.py does for as long as one likes."""

from __future__ import annotations

from pathlib import Path

import kill_convert as tool
import numpy as np
import pytest
from conftest import random_picture, write_jpeg


def test_kills_at_random_moments_tear_nothing_and_lose_nothing(tmp_path: Path) -> None:
    counts = tool.kill_conversions(8, seed=1, folder=tmp_path)
    assert not counts.violations, "seed 1:\n" + "\n".join(counts.violations)
    assert counts.rounds == 8
    assert counts.before + counts.during + counts.publishing + counts.after == 8
    assert counts.during + counts.publishing > 0
    assert counts.with_workers == 2
    assert counts.parent_only == 4
    assert counts.torn == 0
    assert counts.identical == counts.resumed > 0
    assert not list(tmp_path.iterdir())


# --- the tool would notice -------------------------------------------------------------------------------------------


@pytest.fixture
def sets(tmp_path: Path) -> tuple[Path, Path]:
    """Two equal published sets."""
    from shardio.converter import convert

    rng = np.random.default_rng(0)
    for number in range(8):
        write_jpeg(tmp_path / "src" / "a" / f"{number}.jpg", random_picture(rng, 20, 20))
    for name in ("one", "two"):
        convert(tmp_path / "src", tmp_path / name, size=8, shard_size=4096 + 4 * 192, workers=1)
    return tmp_path / "one", tmp_path / "two"


def test_equal_sets_are_not_torn(sets: tuple[Path, Path]) -> None:
    assert tool.torn_files(*sets) == []
    assert tool.hash_files(sets[0]) == tool.hash_files(sets[1])


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("short", "train-00001.npy: NumPy cannot open it"),
        ("long", "train-00001.npy: its header implies 4864 bytes, found 4865"),
        ("changed", "train-00001.npy: differs from the undisturbed one"),
        ("changed index", "train-index.npy: differs from the undisturbed one"),
        ("stranger", "train-00002.npy: not a file of the finished set"),
        ("lost shard", "published, but "),
    ],
)
def test_a_torn_file_is_noticed(sets: tuple[Path, Path], name: str, fault: str) -> None:
    out, reference = sets
    shard = out / "train-00001.npy"
    data = shard.read_bytes()
    match name:
        case "short":
            shard.write_bytes(data[:-1])
        case "long":
            shard.write_bytes(data + b"\0")
        case "changed":
            shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "changed index":
            index = out / "train-index.npy"
            index.write_bytes(index.read_bytes()[:-1] + b"\xff")
        case "stranger":
            (out / "train-00002.npy").write_bytes(data)
        case _:
            shard.unlink()
    faults = tool.torn_files(out, reference)
    assert any(one.startswith(fault) for one in faults), faults


def test_temporary_files_and_work_folders_left_over_are_noticed(sets: tuple[Path, Path]) -> None:
    out, reference = sets
    (out / ".convert").mkdir()
    assert tool.hash_files(out) != tool.hash_files(reference)
    (out / ".convert").rmdir()
    (out / ".x.tmp").write_bytes(b"")
    assert tool.hash_files(out) != tool.hash_files(reference)
