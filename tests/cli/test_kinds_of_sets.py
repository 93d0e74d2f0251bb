"""What commands say of sets with arrays and orders, of sets without labels, and of sets without pixels."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import change_split, some_arrays
from command import called
from folders import flip

from shardio.conversion.arrays import ArrayDeclaration
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.errors import ShardioError


@pytest.fixture
def unlabeled(tmp_path: Path) -> Path:
    with ShardWriter(tmp_path / "unlabeled", (8, 8, 3), labels=None) as writer:
        for i in range(9):
            writer.append(np.full((8, 8, 3), 20 * i, np.uint8), key=f"{i}.png")
    return tmp_path / "unlabeled"


@pytest.fixture
def latents(tmp_path: Path) -> Path:
    arrays: dict[str, ArrayDeclaration] = {"latent": ("array", "float16", (4,))}
    with ShardWriter(tmp_path / "latents", None, labels=("float32", 2), arrays=arrays) as writer:
        for i in range(9):
            writer.append(label=[i, 0.5], key=f"{i}.png", latent=np.full(4, i, np.float16))
    return tmp_path / "latents"


def test_info_says_which_parts_there_are(unlabeled: Path, latents: Path) -> None:
    text = called("info", unlabeled)
    assert "train   9 samples in 1 shard, no labels\n" in text
    assert "array" not in text
    assert "order" not in text
    text = called("info", latents)
    assert "arrays, and no pixels" in text
    assert f"next: shardio find {latents}" in text
    found = [facts("info", path) for path in (unlabeled, latents)]
    assert [one["splits"]["train"]["labels"] for one in found] == [None, ["<f4", 2]]
    assert [one["sample_shape"] for one in found] == [[8, 8, 3], None]


def test_samples_without_labels_are_found_shown_written_and_replayed(unlabeled: Path, tmp_path: Path) -> None:
    found = [line.split() for line in called("find", unlabeled, "--key", "[34]*").splitlines()]
    assert found[:2] == [["3", "3.png"], ["4", "4.png"]]
    (first, *_) = facts("find", unlabeled)["samples"]
    assert (first["label"], first["class"]) == (None, None)
    called("view", unlabeled, "-o", tmp_path / "sheet.png")
    called("report", unlabeled, "-o", tmp_path / "report.html")
    called("extract", unlabeled, "-o", tmp_path / "files", "--indices", "2")
    with (tmp_path / "files" / "labels.csv").open() as file:
        assert [(row["key"], row["label"]) for row in csv.DictReader(file)] == [("2.png", "")]
    replayed = facts("replay", unlabeled, "--batch-size", "4", "--save", tmp_path / "batch.npz")
    assert replayed["labels"] == [None] * 4
    with np.load(tmp_path / "batch.npz") as batch:
        assert sorted(batch) == ["images", "indices"]


def test_samples_without_pixels_are_written_and_replayed_and_not_shown(latents: Path, tmp_path: Path) -> None:
    called("extract", latents, "-o", tmp_path / "files", "--indices", "2")
    assert np.load(tmp_path / "files" / "2-2.latent.npy").tolist() == [2.0] * 4
    called("replay", latents, "--batch-size", "4", "--save", tmp_path / "batch.npz")
    with np.load(tmp_path / "batch.npz") as file:
        batch = dict(file)
    assert sorted(batch) == ["indices", "labels", "latent"]
    assert batch["labels"][:, 0].tolist() == batch["indices"].tolist() == batch["latent"][:, 0].tolist()
    with pytest.raises(ShardioError, match=f"{latents}, train: expected a set with pixels.*shardio extract"):
        called("view", latents, "-o", tmp_path / "a.png")
    with pytest.raises(ValueError, match=f"{latents}: --output needs images"):
        called("replay", latents, "--batch-size", "4", "-o", tmp_path / "a.png")


@pytest.mark.parametrize(
    "words",
    [["find", "--class", "1"], ["view", "--per-class", "1"], ["bench", "--transform", "torchvision-v2"]],
)
def test_classes_of_a_split_without_labels_are_refused(unlabeled: Path, words: list[str]) -> None:
    with pytest.raises(ValueError, match="class"):
        called(words[0], unlabeled, *words[1:])


# --- arrays and orders -----------------------------------------------------------------------------------------------


@pytest.fixture
def out(make_set: Callable[..., Path]) -> Path:
    out = make_set(20)
    change_split(out, some_arrays(20, 6, 5), np.array([5, 19, 5, 0, 1, 2, 3, 7]))
    return out


def facts(*words: object) -> Any:
    return json.loads(called(*words, "--json"))


def test_info_tells_arrays_and_how_many_stored_samples_are_in_use(out: Path) -> None:
    lines = called("info", out).splitlines()
    assert "  train   8 samples in 2 shards" in lines
    assert "          order 0: 7 of 20 stored samples in use" in lines
    (mask,) = (line for line in lines if line.startswith("          mask "))
    assert " ".join(mask.split()) == "mask mask 6 x 5 uint8 17.1 kB 0: 7 of 20 stored in use"
    assert len(lines) < 24
    train = facts("info", out)["splits"]["train"]
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
    flip(out / "train-order-0.npy")
    for told in ("not counted: ", "train-order-0.npy: expected a file of the shard set, found nothing"):
        text = called("info", out)
        assert "order 0: ? of 20 stored samples in use" in text
        assert told in text
        (out / "train-order-0.npy").unlink(missing_ok=True)
    assert "state   damaged: " in text
