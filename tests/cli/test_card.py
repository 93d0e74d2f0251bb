"""`shardio card`: the files that describe a set on a data hub."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from command import assert_one_clear_error, shardio
from pictures import random_picture, write_jpeg
from servers import SlowServer

from shardio import change, convert, open_shards
from shardio.cli.main import cli
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.format.manifest_file import load_manifest


def card_of(out: Path, folder: Path, *words: object) -> tuple[str, dict[str, Any]]:
    """README.md and croissant.json."""
    result = CliRunner().invoke(cli, ["card", str(out), "-o", str(folder), *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return (folder / "README.md").read_text("utf-8"), json.loads((folder / "croissant.json").read_text("ascii"))


def front_matter(readme: str) -> dict[str, Any]:
    """Its values are JSON, but for plain words."""
    lines = readme.split("---\n")[1].splitlines()
    values = dict(line.split(": ", 1) for line in lines)
    return {name: json.loads(text) if text[0] in '"[tf' else text for name, text in values.items()}


def records(croissant: dict[str, Any], name: str) -> list[list[Any]]:
    tables = {table["@id"]: table for table in croissant["recordSet"]}
    return [list(row.values()) for row in tables[name]["data"]] if name in tables else []


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train and val of two classes, of which one has a name that is Markdown; an image was refused."""
    folder = tmp_path_factory.mktemp("card")
    rng = np.random.default_rng(5)
    for split, count in (("train", 4), ("val", 2)):
        for name in ("ant", "b|<i>"):
            for number in range(count):
                write_jpeg(folder / "src" / split / name / f"{number}.jpg", random_picture(rng, 20, 30))
    (folder / "src/train/ant/empty.jpg").write_bytes(b"")
    convert(folder / "src", folder / "out", size=16, max_bad=1)
    return folder / "out"


def test_the_readme_says_what_the_set_holds_and_how_it_was_made(converted: Path, tmp_path: Path) -> None:
    words = ("--name", "My: photos", "--license", "CC-BY-4.0", "--source-url", "https://example.org/photos")
    readme, _ = card_of(converted, tmp_path, *words)
    assert front_matter(readme) == {
        "pretty_name": "My: photos",
        "license": "cc-by-4.0",
        "size_categories": ["n<1K"],
        "task_categories": ["image-classification"],
        "tags": ["shardio"],
        "viewer": False,
    }
    assert "\n# My: photos\n\n12 samples of 16 x 16 x 3 uint8 pixels in 2 classes" in readme
    assert re.search(r"^\| val \| 4 \| 1 \| ", readme, re.MULTILINE)
    assert "\n| 0 | ant | 4 | 2 |\n| 1 | b\\|\\<i\\> | 4 | 2 |\n\n" in readme
    assert "\n    Normalize(mean=(0." in readme
    assert "crop, bicubic, exact, shuffled, seed 0" in readme
    assert "1 image refused (empty 1); `rejects.jsonl` has the reasons." in readme
    assert "<https://example.org/photos>" in readme
    assert load_manifest(converted).digest in readme


def test_croissant_has_the_checksum_of_each_file_and_the_counts(converted: Path, tmp_path: Path) -> None:
    _, croissant = card_of(converted, tmp_path, "--source-url", "https://example.org/photos")
    files = {file["contentUrl"]: file for file in croissant["distribution"]}
    assert sorted(files) == sorted(path.name for path in converted.iterdir())
    for name, file in files.items():
        data = (converted / name).read_bytes()
        assert (file["sha256"], file["contentSize"]) == (hashlib.sha256(data).hexdigest(), f"{len(data)} B")
    assert records(croissant, "splits") == [["train", 8], ["val", 4]]
    assert records(croissant, "classes") == [[0, "ant", "ant", 4, 2], [1, "b|<i>", "b|<i>", 4, 2]]
    levels = load_manifest(converted).provenance["pixels"]
    assert records(croissant, "pixels") == [[i, levels["mean"][i], levels["std"][i]] for i in range(3)]
    assert croissant["name"] == "out"
    assert croissant["prov:wasDerivedFrom"] == {"@id": "https://example.org/photos"}
    assert "license" not in croissant


def test_mlcroissant_finds_no_error_and_reads_the_tables(converted: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlcroissant = pytest.importorskip("mlcroissant")
        words = ("--license", "https://spdx.org/licenses/CC0-1.0", "--source-url", "https://example.org/photos")
        card_of(converted, tmp_path, *words)
        dataset = mlcroissant.Dataset(jsonld=tmp_path / "croissant.json")
        assert not dataset.metadata.ctx.issues.errors
        recommended = {"citeAs", "datePublished", "version"}  # which the set does not know
        told = {re.search(r'(\w+)" is recommended', text)[1] for text in dataset.metadata.ctx.issues.warnings}  # type: ignore[index]
        assert told <= recommended
        (ant, _) = dataset.records(record_set="classes")
    assert (ant["classes/label"], ant["classes/num_samples_train"]) == (0, 4)


def test_hugging_faces_client_reads_the_front_matter(converted: Path, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")  # as huggingface_hub does
    readme, _ = card_of(converted, tmp_path, "--name", 'a "b" # é \U0001f40d', "--license", "https://example.org/terms")
    loaded = yaml.safe_load(readme.split("---\n")[1])
    assert loaded["pretty_name"] == 'a "b" # é \U0001f40d'
    assert (loaded["license"], loaded["license_link"]) == ("other", "https://example.org/terms")


def test_the_same_set_has_the_same_card(converted: Path, tmp_path: Path) -> None:
    assert card_of(converted, tmp_path / "a") == card_of(converted, tmp_path / "b")


@pytest.mark.parametrize("name", ["README.md", "croissant.json"])
def test_a_file_is_replaced_only_on_request(name: str, converted: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    words = ("card", converted, "-o", tmp_path)
    assert_one_clear_error(shardio(*words), 2, str(tmp_path / name), "--replace")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"
    assert shardio(*words, "--replace").returncode == 0
    assert (tmp_path / name).read_text() != "mine"


def test_what_is_not_stated_is_asked_for(converted: Path, tmp_path: Path) -> None:
    result = shardio("card", converted, "-o", tmp_path)
    assert "give --license" in result.stdout
    assert "give --source-url" in result.stdout
    assert (tmp_path / "README.md").read_text().count("not stated") == 2


@pytest.mark.parametrize("url", ["photos", "ftp://example.org", "https://example.org/>\n# x", "javascript:alert(1)"])
def test_a_source_is_the_address_of_a_page(url: str, converted: Path, tmp_path: Path) -> None:
    result = shardio("card", converted, "-o", tmp_path / "card", "--source-url", url)
    assert_one_clear_error(result, 2, "--source-url")
    assert not (tmp_path / "card").exists()


def test_nothing_is_written_of_a_folder_without_a_set_or_with_a_damaged_one(converted: Path, tmp_path: Path) -> None:
    assert_one_clear_error(shardio("card", tmp_path, "-o", tmp_path / "card"), 1, "holds no shard set")
    copy = shutil.copytree(converted, tmp_path / "copy")
    (copy / "val-00000.npy").unlink()
    assert_one_clear_error(shardio("card", copy, "-o", tmp_path / "card"), 1, "val-00000.npy")
    assert not (tmp_path / "card").exists()


def test_sets_without_labels_or_pixels_have_cards(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "unlabelled", (8, 8, 3), labels=None) as writer:
        writer.append(np.zeros((8, 8, 3), np.uint8), key="a.png")
    arrays = {"latent": ("array", "float16", (4,))}
    with ShardWriter(tmp_path / "latents", None, labels=("float32", 2), arrays=arrays) as writer:
        writer.append(label=[1, 0.5], key="a", latent=np.zeros(4, np.float16))
    for name, what in (("unlabelled", "1 sample of 8 x 8 x 3 uint8 pixels,"), ("latents", "1 sample of arrays,")):
        readme, croissant = card_of(tmp_path / name, tmp_path / f"{name}-card")
        assert what in readme
        assert "## Classes" not in readme
        assert "task_categories" not in front_matter(readme)
        assert records(croissant, "classes") == []


def test_samples_without_a_class_are_counted_in_none(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "all", (2, 2, 3), classes=["a", "b"]) as writer:
        for split in ("train", "val"):
            writer.append(np.zeros((2, 2, 3), np.uint8), 1, split=split)
    change(tmp_path / "all", tmp_path / "out", split="val", arrays={"labels": np.ones(1, np.float32)})
    with ShardWriter(tmp_path / "vectors", (2, 2, 3), classes=["a", "b"], labels=("float32", 2)) as writer:
        writer.append(np.zeros((2, 2, 3), np.uint8), [0, 1])
    for name, counts in (("out", ([0], [1])), ("vectors", ([], []))):
        readme, croissant = card_of(tmp_path / name, tmp_path / f"{name}-card")
        assert records(croissant, "classes") == [[0, "a", "a", *counts[0]], [1, "b", "b", *counts[1]]]
        assert ("\n| 1 | b |" + "".join(f" {count} |" for count in counts[1]) + "\n\n") in readme


def test_the_readme_shows_some_of_many_classes_and_croissant_all(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "out", (2, 2, 3), classes=[f"c{i}" for i in range(150)]) as writer:
        writer.append(np.zeros((2, 2, 3), np.uint8), 149, key="a.png")
    readme, croissant = card_of(tmp_path / "out", tmp_path / "card")
    assert len(re.findall(r"^\| \d+ \| c\d+ \| 0 \|$", readme, re.MULTILINE)) == 100
    assert "`croissant.json` has all 150 classes." in readme
    assert records(croissant, "classes")[149] == [149, "c149", "c149", 1]


def test_a_set_on_a_hub_is_staged(converted: Path, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")

    def answer(handler: Any) -> None:
        path = handler.path.partition("?")[0]
        if name := re.fullmatch(r"/datasets/user/photos/resolve/main/([\w.-]+)", path):
            data = (converted / name[1]).read_bytes()
        else:
            entries = [(entry.name, entry.stat().st_size) for entry in os.scandir(converted)]
            files = [{"type": "file", "path": name, "size": nbytes, "oid": "0"} for name, nbytes in entries]
            data = json.dumps(files if "/tree/main" in path else {"id": "user/photos", "sha": "0" * 40}).encode()
        if wanted := handler.headers.get("Range"):
            first, last = map(int, wanted.removeprefix("bytes=").split("-"))
            data = data[first : last + 1]
        handler.send_response(206 if wanted else 200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    hub = SlowServer(tmp_path, lambda path: answer)
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    try:
        result = shardio("stage", "hf://datasets/user/photos", tmp_path / "cache", env=env)
    finally:
        hub.close()
    assert result.returncode == 0, result.stderr
    assert open_shards(result.stdout.strip()).manifest.digest == load_manifest(converted).digest
