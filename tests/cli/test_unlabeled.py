"""What commands say of sets without labels, and of sets without pixels."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from shardio.cli.main import cli
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.errors import ShardioError


def call(*words: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, words)))


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
    assert "train   9 samples in 1 shard, no labels\n" in call("info", unlabeled).stdout
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
    assert "no picture to show. `shardio extract` writes arrays" in str(result.exception)
    result = call("replay", latents, "--batch-size", "4", "-o", tmp_path / "a.png")
    assert f"{latents}: expected a set with pixels to draw" in str(result.exception)


@pytest.mark.parametrize(
    "words",
    [["find", "--class", "1"], ["view", "--per-class", "1"], ["bench", "--transform", "torchvision-v2"]],
)
def test_classes_of_a_split_without_labels_are_refused(unlabeled: Path, words: list[str]) -> None:
    result = call(words[0], unlabeled, *words[1:])
    assert isinstance(result.exception, ValueError)
    assert "class" in str(result.exception)
