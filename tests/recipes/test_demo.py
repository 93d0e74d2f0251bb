"""examples/demo.py and examples/elastic.py: what they print, and that they leave nothing behind."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from pictures import random_picture, write_jpeg
from places import ROOT


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """printed(name, *words): what an example prints. Its temporary folders are in tmp/."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.syspath_prepend(ROOT / "examples")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")

    def run(name: str, *words: object) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
        import_module(name).main()
        said = capfd.readouterr()
        assert [line for line in said.err.splitlines() if not line.startswith("shardio: ")] == []  # what SRC means
        assert not list((tmp_path / "tmp").glob("shardio*"))
        return said.out

    return run


def test_a_demo_leaves_nothing_anywhere_unless_it_is_told_where(printed: Callable[..., str], tmp_path: Path) -> None:
    images = tmp_path / "images"
    for number in range(8):
        picture = random_picture(np.random.default_rng(number), 32, 32)
        write_jpeg(images / f"c{number % 2}" / f"{number}.jpg", picture)
    said = printed("demo", images, "--seconds", 0.01, "--size", 16)
    assert f"$ shardio convert {images} {tmp_path / 'tmp' / 'shardio-demo-'}" in said
    plain, shards, ratio = re.search(
        r"DataLoader +([\d,]+) .*\n.*ShardLoader +([\d,]+) .*\n([\d.]+) x\n", said
    ).groups()
    plain, shards = (int(text.replace(",", "")) for text in (plain, shards))
    assert abs(float(ratio) - shards / plain) < 0.2 * float(ratio)
    assert "--out FOLDER" in said
    for path in images.glob("*/*"):
        path.rename(path.with_suffix(".bin"))
    said = printed("demo", images, "--out", tmp_path / "kept", "--size", 16)
    assert "found no files" in said
    assert (tmp_path / "kept" / "manifest.json").exists()


def test_killed_and_resumed_ranks_read_the_batches_of_one_process(printed: Callable[..., str]) -> None:
    assert printed("elastic", "--steps", 9).splitlines()[3:] == [
        "  1 process, uninterrupted: steps 1 to 9",
        "  4 ranks of 15 samples: steps 1 to 5, then killed",
        "  3 ranks of 20 samples: steps 5 to 8, then killed",
        "  5 ranks of 12 samples: steps 8 to 9",
        "all 11 global batches are bit-equal to the uninterrupted run's: pixels, labels, order",
        "  9 steps, and 2 repeated: they came after the last saved state",
    ]


@pytest.mark.parametrize(
    ("first", "changed", "words"),
    [
        ({1: 1, 4: 1, 3: 5, 5: 8}, (3, 6), "step 6 on 3 ranks"),
        ({1: 1, 4: 1, 3: 7, 5: 8}, None, "skipped"),
    ],
)
def test_a_difference_is_an_error(
    first: dict[int, int], changed: object, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    import elastic

    def batches(run: elastic.Run) -> object:
        for step in range(first[run.world_size], run.last + 1):
            yield step, [bytes([step, sample + ((run.world_size, step) == changed)]) for sample in range(60)]

    monkeypatch.setattr(elastic, "global_batches", batches)
    with pytest.raises(SystemExit, match=words):
        elastic.compare_runs(tmp_path, tmp_path, 9)
