"""What commands say of sets with arrays and orders, of sets without labels, and of sets without pixels."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from arrays import change_split, some_arrays
from command import call, shardio
from folders import contents, flip

from shardio.conversion.writing.set_writer import ShardWriter
from shardio.errors import ShardioError
from shardio.format.manifest_file import load_manifest


@pytest.fixture
def unlabeled(tmp_path: Path) -> Path:
    with ShardWriter(tmp_path / "unlabeled", (8, 8, 3), labels=None) as writer:
        for i in range(9):
            writer.append(np.full((8, 8, 3), 20 * i, np.uint8), key=f"{i}.png")
    return tmp_path / "unlabeled"


@pytest.fixture
def latents(tmp_path: Path) -> Path:
    with ShardWriter(
        tmp_path / "latents", None, labels=("float32", 2), arrays={"latent": ("array", "float16", (4,))}
    ) as writer:
        for i in range(9):
            writer.append(label=[i, 0.5], key=f"{i}.png", latent=np.full(4, i, np.float16))
    return tmp_path / "latents"


def test_info_says_which_parts_there_are(unlabeled: Path, latents: Path) -> None:
    text = call("info", unlabeled).stdout
    assert "train   9 samples in 1 shard, no labels\n" in text
    assert "array" not in text
    assert "order" not in text
    text = call("info", latents).stdout
    assert "arrays, and no pixels" in text
    assert f"next: shardio find {latents}" in text
    facts = [json.loads(call("info", path, "--json").stdout) for path in (unlabeled, latents)]
    assert [one["splits"]["train"]["labels"] for one in facts] == [None, ["<f4", 2]]
    assert [one["sample_shape"] for one in facts] == [[8, 8, 3], None]


def test_samples_without_labels_are_found_shown_written_and_replayed(unlabeled: Path, tmp_path: Path) -> None:
    found = [line.split() for line in call("find", unlabeled, "--key", "[34]*").stdout.splitlines()]
    assert found[:2] == [["3", "3.png"], ["4", "4.png"]]
    (first, *_) = json.loads(call("find", unlabeled, "--json").stdout)["samples"]
    assert (first["label"], first["class"]) == (None, None)
    assert call("view", unlabeled, "-o", tmp_path / "sheet.png").exit_code == 0
    assert call("report", unlabeled, "-o", tmp_path / "report.html").exit_code == 0
    assert call("extract", unlabeled, "-o", tmp_path / "files", "--indices", "2").exit_code == 0
    with (tmp_path / "files" / "labels.csv").open() as file:
        assert [(row["key"], row["label"]) for row in csv.DictReader(file)] == [("2.png", "")]
    replayed = call("replay", unlabeled, "--batch-size", "4", "--json", "--save", tmp_path / "batch.npz")
    assert json.loads(replayed.stdout)["labels"] == [None] * 4
    with np.load(tmp_path / "batch.npz") as batch:
        assert sorted(batch) == ["images", "indices"]


def test_samples_without_pixels_are_written_and_replayed_and_not_shown(latents: Path, tmp_path: Path) -> None:
    assert call("extract", latents, "-o", tmp_path / "files", "--indices", "2").exit_code == 0
    assert np.load(tmp_path / "files" / "2-2.latent.npy").tolist() == [2.0] * 4
    assert call("replay", latents, "--batch-size", "4", "--save", tmp_path / "batch.npz").exit_code == 0
    with np.load(tmp_path / "batch.npz") as file:
        batch = dict(file)
    assert sorted(batch) == ["indices", "labels", "latent"]
    assert batch["labels"][:, 0].tolist() == batch["indices"].tolist() == batch["latent"][:, 0].tolist()
    result = call("view", latents, "-o", tmp_path / "a.png")
    assert isinstance(result.exception, ShardioError)
    assert f"{latents}, train: expected a set with pixels" in str(result.exception)
    assert "`shardio extract` writes" in str(result.exception)
    result = call("replay", latents, "--batch-size", "4", "-o", tmp_path / "a.png")
    assert f"{latents}: --output needs images" in str(result.exception)


@pytest.mark.parametrize(
    "words",
    [["find", "--class", "1"], ["view", "--per-class", "1"], ["bench", "--transform", "torchvision-v2"]],
)
def test_classes_of_a_split_without_labels_are_refused(unlabeled: Path, words: list[str]) -> None:
    result = call(words[0], unlabeled, *words[1:])
    assert isinstance(result.exception, ValueError)
    assert "class" in str(result.exception)


# --- arrays and orders -----------------------------------------------------------------------------------------------


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
    flip(out / "train-order-0.npy")
    text = shardio("info", out).stdout
    assert "order 0: ? of 20 stored samples in use" in text
    assert "not counted: " in text
    (out / "train-order-0.npy").unlink()
    text = shardio("info", out).stdout
    assert "order 0: ? of 20 stored samples in use" in text
    assert "state   damaged: " in text
    assert "train-order-0.npy: expected a file of the shard set, found nothing" in text


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
