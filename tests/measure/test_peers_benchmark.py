"""The table and the plot of the peers, drawn from made-up results; and what the runner of a way measures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from places import BENCHMARKS


def row(*rates: float, note: str = "", seconds: float = 0.0) -> dict[str, Any]:
    return {
        "versions": ["x 1.0"],
        "note": note,
        "made": {"seconds": seconds},
        "rounds": [
            {
                "images_per_second": rate,
                "cpu_us_per_image": 1e6 / rate,
                "first_batch_seconds": 0.5,
                "pss": 2e6,
                "private": 1e6,
            }
            for rate in rates
        ],
        "date": "2000-01-01",
        "command": "python it",
    }


@pytest.fixture
def peers(module: Callable[[str], ModuleType]) -> Any:
    return module("peers")


@pytest.fixture
def run(module: Callable[[str], ModuleType]) -> Any:
    return module("run")


def drawn(peers: Any, rows: dict[str, Any]) -> tuple[list[str], ElementTree.Element]:
    results = {"machine": "a machine", "title": "Ways", "workers": 2, "num_images": 500, "rows": rows}
    return list(peers.table(results)), ElementTree.fromstring(peers.picture(results))


def test_rows_have_medians_and_ranges_and_those_not_run_their_reason(peers: Any) -> None:
    rows = {"slow <&>": row(10, 30, 20, note="lost one"), "ShardLoader": row(1000), "none": {"not_run": "no CUDA"}}
    table, picture = drawn(peers, rows)
    assert table[:2] == ["a machine", "2000-01-01: `python it`"]
    assert table[5].startswith("| ShardLoader | 1,000 (1,000 to 1,000) | 1,000.0 ")
    assert table[6].startswith("| slow <&> (lost one) | 20 (10 to 30) | 50,000.0 (33,333.3 to 100,000.0) | 0.50 ")
    assert table[-1] == "- none: not measured: no CUDA"
    bars = picture.findall("{*}rect")
    assert [(bar.get("class"), bar.get("width")) for bar in bars] == [("o", "300.0"), ("p", "6.0")]
    ends = [float(text.get("x", "")) + 7 * len(text.text or "") for text in picture.findall("{*}text")]
    assert max(ends) <= 400
    assert "slow <&>" in [text.text for text in picture.findall("{*}text")]


def test_what_a_conversion_saves_is_told(peers: Any) -> None:
    rows = {
        "ShardLoader: crop": row(1000, seconds=2.0),
        "ImageFolder: crop": row(200),
        "fast: crop": row(2000),
        "converted, too: crop": row(200, seconds=3.0),
        "another: evaluation": row(200),
        "ShardLoader: samples alone, 2 workers": row(5000, seconds=2.0),
        "SPDL: decode and resize alone, 2 workers": row(100),
    }
    table, _ = drawn(peers, rows)
    assert [
        line.partition("which it has saved after ")[2]
        for line in table
        if "conversion of 500 images took 2.0 s" in line
    ] == [
        "1.0 epochs in place of ImageFolder: crop",
        "0.4 epochs in place of SPDL: decode and resize alone, 2 workers",
    ]


def test_each_library_of_a_part_has_its_module_and_its_environment(peers: Any) -> None:
    for part in peers.PARTS.values():
        assert (part.reference in part.libraries) == bool(part.compared)
        for library, environment in part.libraries.items():
            assert (BENCHMARKS / "peers" / f"{library}.py").exists()
            assert environment in ("", *peers.ENVIRONMENTS)


def test_an_environment_shares_torch_unless_its_library_needs_another(
    peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[list[str]] = []

    def call(command: list[object], timeout: float) -> str:
        words = list(map(str, command))
        if words[1:3] == ["-m", "venv"]:
            (Path(words[3]) / "lib" / "python3" / "site-packages").mkdir(parents=True)
        else:
            installed.append(words[5:])
        return ""

    monkeypatch.setattr(peers, "BUILD", tmp_path)
    monkeypatch.setattr(peers, "call", call)
    peers.environment("torchcodec")
    assert [path.name for path in tmp_path.iterdir()] == ["torchcodec"]
    assert installed == [*peers.ENVIRONMENTS["torchcodec"]]
    peers.environment("spdl")
    assert installed[1][:2] == ["-c", str(peers.ROOT / "constraints.txt")]
    shared = tmp_path / "spdl" / "lib" / "python3" / "site-packages" / "torch.pth"
    assert shared.read_text() == f"{tmp_path / 'torch' / 'lib' / 'python3' / 'site-packages'}\n"


def test_lost_and_repeated_samples_are_counted(run: Any) -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 1, 4)
    whole = run.check(lambda epoch: iter([(pixels, [0, 1, 2])]))
    turned = run.check(lambda epoch: iter([(pixels[[2, 0]], [2, 0]), (pixels[[1]], [1])]))
    lost = run.check(lambda epoch: iter([(pixels[[0, 0]], [0, 0])]))
    assert whole == turned
    assert (lost["samples"], lost["distinct"]) == (2, 1)
    assert lost["digest"] != whole["digest"]
    numbers = run.check(lambda epoch: iter([(None, [2, 0]), (None, [2])]))
    assert (numbers["samples"], numbers["distinct"]) == (3, 2)


def test_a_batch_counts_once_it_is_on_the_gpu(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [(torch.zeros(2), [0, 1]), (None, [2])]
    monkeypatch.setattr(run, "gpu", lambda: None)
    assert list(run.delivered(iter(batches))) == batches
    done: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: done.append("copied"))
    cuda = SimpleNamespace(current_stream=lambda: stream)
    monkeypatch.setattr(run, "gpu", lambda: SimpleNamespace(Tensor=torch.Tensor, cuda=cuda))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, non_blocking: done.append("copying") or self + 1)
    delivered = run.delivered(iter(batches))
    assert next(delivered)[0].tolist() == [1, 1]
    assert done == ["copying", "copied"]
    assert next(delivered) == (None, [2])
