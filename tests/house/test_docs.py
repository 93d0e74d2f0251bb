"""What the documents say is run, and what they show is recomputed."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from documents import code_blocks
from forked import run_forked
from pictures import random_picture, write_jpeg
from places import DATA, ROOT
from storages import draw_imagenet, write_archives, write_kaggle, write_list, write_webdataset

from shardio.conversion.images.decode import MAX_PIXELS, MAX_SOURCE_NBYTES
from shardio.errors import Reason

README = (ROOT / "README.md").read_text(encoding="utf-8")
FORMAT = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
GOLDEN = DATA / "golden"


@pytest.fixture(scope="module")
def readers_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the README's reader has it: imagenet/ with train and val, a small one in other storages, and some as
    parquet in imagenet-1k/."""
    folder = tmp_path_factory.mktemp("reader")
    rng = np.random.default_rng(0)
    for split, count in (("train", 260), ("val", 10)):
        for number in range(count):
            name = f"n0144076{number % 3}"
            write_jpeg(folder / "imagenet" / split / name / f"{number}.JPEG", random_picture(rng, 40, 60))
    small = draw_imagenet(folder / "small", sound=True)
    write_archives(small, folder / "downloads")
    write_kaggle(small, folder / "kaggle")
    write_list(small, folder / "images.csv")
    write_webdataset(small, folder / "tars")
    images = [{"bytes": path.read_bytes(), "path": path.name} for path in sorted(folder.glob("imagenet/val/*/*"))]
    (folder / "imagenet-1k" / "data").mkdir(parents=True)
    table = pa.table({"image": images, "label": [number % 3 for number in range(len(images))]})
    pq.write_table(table, folder / "imagenet-1k" / "data" / "train-00000-of-00001.parquet")
    return folder


def test_every_code_block_of_the_readme_runs(readers_folder: Path) -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert {language for language, _ in blocks} == {"bash", "python"}
    for language, block in blocks:
        if language == "python":
            script = readers_folder / "block.py"
            script.write_text(block, encoding="utf-8")
            run_in(readers_folder, ["block.py"])
            continue
        for line in block.splitlines():
            words = shlex.split(line)
            if words[0] == "shardio":
                run_in(readers_folder, words)
            else:
                # These set up a machine. The continuous integration runs the last two in a fresh clone.
                assert line in ("pip install shardio", "make demo", "make test")


def run_in(folder: Path, command: list[str]) -> None:
    result = run_forked(*command, cwd=folder)
    assert result.returncode == 0, f"{command}: {result.stdout}\n{result.stderr}"


def test_ci_runs_the_commands_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make test" in script
    assert "make demo" in script


def test_the_worked_example_shows_the_bytes_of_the_golden_set() -> None:
    blocks = re.findall(r"^```hexdump (\S+)\n(.*?)^```", FORMAT, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in blocks] == ["train-00000.npy", "train-index.npy", "golden-columns/train-index.npy"]
    for name, block in blocks:
        data = (DATA / name if "/" in name else GOLDEN / name).read_bytes()
        for line in block.splitlines():
            if line == "*":
                continue
            offset, shown = int(line[:8], 16), bytes.fromhex(line[10:57])
            assert data[offset : offset + len(shown)] == shown, f"{name} at {offset:#x}"


GOLDEN_SETS = [GOLDEN, DATA / "golden-columns"]


@pytest.mark.parametrize("folder", GOLDEN_SETS, ids=lambda folder: folder.name)
def test_the_worked_example_states_the_digest_of_the_golden_set(folder: Path) -> None:
    assert json.loads((folder / "manifest.json").read_bytes())["digest"] in FORMAT


@pytest.mark.parametrize("folder", GOLDEN_SETS, ids=lambda folder: folder.name)
def test_the_digest_is_what_the_format_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = code_blocks(FORMAT, "python")
    monkeypatch.chdir(folder)
    # The document's own code ends in an assertion; it leaves its file open, which is not for us to judge.
    exec(
        block.replace('json.load(open("manifest.json"))', 'json.loads(open_text("manifest.json"))'),
        {"open_text": _read},
    )


def _read(name: str) -> str:
    return Path(name).read_text(encoding="ascii")


def test_the_worked_example_reads_the_index_right() -> None:
    index = np.load(GOLDEN / "train-index.npy", mmap_mode="r")
    assert index.itemsize == 40
    assert index[1].tolist() == (1, b"dog/rex.png", 499, 333, 0x989983C6)
    assert index[2]["key"].decode() == "cat/garfield-ü.png"


def test_every_reason_of_a_refusal_is_explained_and_no_other() -> None:
    section = FORMAT.partition("### rejects.jsonl")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z ]+)` \|", section, re.MULTILINE)) == set(get_args(Reason))


def test_the_memory_that_is_stated_is_that_of_the_limits() -> None:
    assert (
        f"{16 * MAX_PIXELS / 1e9:.1f} GB for the\nlargest picture that is taken ({MAX_PIXELS / 1e6:.0f} megapixels)"
        in README
    )
    assert f"{4 * MAX_SOURCE_NBYTES / 1e9:.1f} GB for the largest file ({MAX_SOURCE_NBYTES / 1e6:.0f} MB)" in README


def test_checksums_of_the_golden_set_are_those_of_sha256sum() -> None:
    manifest = json.loads((GOLDEN / "manifest.json").read_bytes())
    train = manifest["splits"]["train"]
    for entry in (train["index"], *train["shards"], manifest["rejects"]):
        assert hashlib.sha256((GOLDEN / entry["file"]).read_bytes()).hexdigest() == entry["sha256"]


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        *("docs/architecture.md", "docs/cluster.md", "docs/integrations.md"),
        *("benchmarks/README.md", "examples/README.md"),
    ],
)
def test_links_and_named_files_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (folder / target).exists(), f"{page}: {target}"
    for target in re.findall(r"`((?:benchmarks|examples|tests|tools|docs)/[\w./-]+)`", text):
        assert (ROOT / target).exists(), f"{page}: {target}"
    for target in re.findall(r"`python (\S+\.py)", text):
        assert (ROOT / target).exists(), f"{page}: {target}"
