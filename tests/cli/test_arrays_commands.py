"""Commands on a set with arrays and orders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from arrays import change_split, some_arrays
from command import shardio
from folders import contents

from shardio.format.manifest_file import load_manifest


@pytest.fixture
def out(make_set: Callable[..., Path]) -> Path:
    out = make_set(20)
    change_split(out, some_arrays(20, 6, 5), np.array([5, 19, 5, 0, 1, 2, 3, 7]))
    return out


def facts(*words: str | Path) -> dict[str, object]:
    result = shardio(*words, "--json")
    assert result.returncode == 0, result.stderr
    found: dict[str, object] = json.loads(result.stdout)
    return found


def test_info_tells_arrays_and_how_many_stored_samples_are_in_use(out: Path) -> None:
    lines = shardio("info", out).stdout.splitlines()
    assert "  train   8 samples in 2 shards" in lines
    assert "          order 0: 7 of 20 stored samples in use" in lines
    (mask,) = (line for line in lines if line.startswith("          mask "))
    assert " ".join(mask.split()) == "mask mask 6 x 5 uint8 17.1 kB 0: 7 of 20 stored in use"
    assert len(lines) < 24
    splits = facts("info", out)["splits"]
    assert isinstance(splits, dict)
    train = splits["train"]
    assert (train["num_samples"], train["num_stored"], train["order"], train["in_use"]) == (8, 20, 0, [7])
    assert train["arrays"]["clip"] == {
        "kind": "array",
        "dtype": "<f2",
        "shape": [16],
        "nbytes": sum(path.stat().st_size for path in out.glob("train-clip-*")),
        "num_stored": 20,
        "order": 0,
    }


def test_info_of_a_damaged_set_tells_what_the_manifest_says(out: Path) -> None:
    (out / "train-order-0.npy").unlink()
    text = shardio("info", out).stdout
    assert "order 0: ? of 20 stored samples in use" in text
    assert "state   damaged: " in text
    assert "train-order-0.npy: expected a file of the shard set, found nothing" in text


def test_info_of_a_set_without_arrays_says_nothing_of_them(make_set: Callable[..., Path]) -> None:
    text = shardio("info", make_set(3)).stdout
    assert "array" not in text
    assert "order" not in text


def test_list_publish_and_stage_take_all_files(out: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    nbytes = load_manifest(out).nbytes
    assert shardio("publish", out, root / "copy").returncode == 0
    assert contents(root / "copy") == contents(out)
    (listed,) = facts("list", root)["roots"][0]["sets"]  # type: ignore[index]
    assert (listed["state"], listed["nbytes"], listed["num_samples"]) == ("published", nbytes, {"train": 8})
    staged = facts("stage", root / "copy", tmp_path / "cache")
    assert contents(Path(str(staged["path"]))) == contents(out)
    assert facts("verify", str(staged["path"]))["ok"]
    (out / "train-mask-00001.npy").unlink()
    assert "train-mask-00001.npy: expected a file of the shard set" in shardio("list", tmp_path).stdout
