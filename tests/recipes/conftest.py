"""Starts of training scripts (tests/support/starts.py), and a set whose samples are known by their labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pictures import sample_pixels
from starts import Starts, starting

from shardio import ShardWriter


@pytest.fixture(scope="session")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starts]:
    with starting(tmp_path_factory.mktemp("starts") / "said") as starts:
        yield starts


@pytest.fixture(scope="session")
def labeled_set(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """labeled_set(num_train, num_val): a set. A sample's label is its index, so losses show what was trained on."""

    def make(num_train: int, num_val: int) -> Path:
        out = tmp_path_factory.mktemp("labeled") / "out"
        classes = [f"c{i}" for i in range(max(num_train, num_val))]
        with ShardWriter(out, (6, 5, 3), classes=classes, shard_nbytes=4096 + 100 * 90) as writer:
            for split, count in (("train", num_train), ("val", num_val)):
                for i in range(count):
                    writer.append(sample_pixels(i), i, split=split)
        return out

    return make


@pytest.fixture(scope="session")
def made_once(labeled_set: Callable[[int, int], Path]) -> Path:
    # 16 batches of 32 and a rest; the validation's last batch on two ranks is one sample, and none.
    return labeled_set(520, 65)


@pytest.fixture
def reader(made_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the reader of docs/integrations.md has it, with the set in out/; it is the current folder."""
    (tmp_path / "out").symlink_to(made_once)
    monkeypatch.chdir(tmp_path)
    return tmp_path
