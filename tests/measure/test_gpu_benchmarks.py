"""The benchmarks for GPUs run, or say why they do not. Their results on a GPU cannot be tested here."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from command import NO_GPU, run_python
from places import BENCHMARKS, ROOT


def test_our_resnet_50_is_the_usual_one(module: Callable[[str], ModuleType]) -> None:
    with torch.device("meta"):
        model = module("resnet").resnet50()
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    # torchvision's names, and no others.
    names = model.state_dict().keys()
    assert len(names) == 320
    assert {"bn1.running_var", "layer1.0.downsample.1.bias", "layer3.5.conv3.weight", "fc.weight"} <= names
    convolutions = [layer for layer in model.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert len(convolutions) == 1 + 3 * (3 + 4 + 6 + 3) + 4
    assert [layer.kernel_size for layer in convolutions if layer.stride == (2, 2)].count((3, 3)) == 3


@pytest.mark.parametrize("command", [["train_step.py"], ["augment.py", "--device", "cuda"], ["all_gpu.py"]])
def test_without_a_gpu_there_is_one_line_and_exit_code_2(command: list[str]) -> None:
    ended = run_python(BENCHMARKS / command[0], *command[1:], **NO_GPU)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1
    assert "no CUDA device is here" in ended.stderr


@pytest.fixture
def all_gpu(module: Callable[[str], ModuleType]) -> ModuleType:
    return module("all_gpu")


def test_all_parts_for_a_gpu_end_within_nine_minutes_and_are_shown_without_one(
    all_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sum(part.seconds for part in all_gpu.PARTS) < 9 * 60
    for part in all_gpu.PARTS:
        assert all((ROOT / word).is_file() for word in part.words if word.endswith(".py"))
    # All tests that are for a GPU are among them.
    marked = {
        path for path in (ROOT / "tests").rglob("test_*.py") if re.search(r"pytest\.mark\.gpu", path.read_text("utf-8"))
    }
    assert marked == {ROOT / name for name in all_gpu.TESTS}
    monkeypatch.setattr(sys, "argv", ["all_gpu.py", "--dry-run"])
    all_gpu.main()
    shown = capsys.readouterr().out
    assert all(f"{part.name}, at most {part.seconds} s:" in shown for part in all_gpu.PARTS)


def test_a_gpu_is_found_and_told_with_its_versions(
    all_gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_of_cuda = "__version__ = '2'\nclass version: cuda = '13'\nclass cuda: get_device_name = lambda: 'Made up'\n"
    (tmp_path / "torch.py").write_text(torch_of_cuda)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = all_gpu.gpu_of(sys.executable)
    assert found.startswith("Made up CUDA 13 torch 2 on ")


def test_a_part_that_fails_or_takes_too_long_costs_no_other_part(
    all_gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [
        all_gpu.Part("bad", ("-c", "print('half'); raise SystemExit(3)"), 60),
        all_gpu.Part("slow", ("-c", "import time; print('begun', flush=True); time.sleep(60)"), 1),
        all_gpu.Part("good", ("-c", "print('all well')"), 60),
    ]
    monkeypatch.setattr(all_gpu, "PARTS", parts)
    monkeypatch.setattr(all_gpu, "gpu_of", lambda python: "Made up")
    monkeypatch.setattr(all_gpu, "pythons", lambda: [sys.executable])
    monkeypatch.setattr(sys, "argv", ["all_gpu.py", "--json", str(tmp_path / "new" / "gpu.json")])
    with pytest.raises(SystemExit) as ended:
        all_gpu.main()
    assert ended.value.code == 1
    report = json.loads((tmp_path / "new" / "gpu.json").read_text())
    assert report["machine"] == "Made up"
    states = [(part["part"], part["state"], part["lines"]) for part in report["parts"]]
    assert states == [
        ("bad", "failed with exit code 3", ["half"]),
        ("slow", "stopped after 1 s", ["begun"]),
        ("good", "done", ["all well"]),
    ]
    assert "== good: done" in capsys.readouterr().out


def test_figures_are_told_with_their_aims(all_gpu: ModuleType) -> None:
    def outcome(part: str, *lines: str, state: str = "done") -> Any:
        return all_gpu.Outcome(part, state, 1.0, list(lines))

    outcomes = [
        outcome("tests", "..s.", "== 3 failed, 120 passed, 4 skipped in 90.1s ==", state="failed with exit code 1"),
        outcome(
            "bus",
            "pinned copy to cuda:0, batch 256   127,800  25.1    3.10",
            "threads  images/s  GB/s  /image     ms  memcpy   take  direct  pinned",
            "1          90,000  17.7    11.1     53    1.81   0.30    18.2   0.703",
            "4         110,000  21.6    12.3     53    1.81   0.30    18.2   0.861",
        ),
        outcome("training", "loss            0.42% (-0.10% to 0.90%), the aim is below 1%"),
    ]
    rows = {row["figure"]: (row["found"], row["met"]) for row in all_gpu.figures_of(outcomes)}
    assert rows == {
        "tests failed": (3, False),
        "tests passed": (120, True),
        "H2D, of bare pinned copies": (0.861, True),
        "% of a step lost to data": (0.42, True),
    }
    table = all_gpu.table_of(all_gpu.figures_of([outcome("tests", "== 7 passed in 1s ==")]))
    assert table[1].split() == ["tests", "failed", "0", "at", "most", "0", "met"]
    assert table[3].split()[-3:] == ["0.85", "not", "measured"]
    assert max(map(len, table)) <= 80


def test_the_training_loop_runs_on_a_cpu(make_set: Callable[..., Path], tmp_path: Path) -> None:
    words = ["--device", "cpu", "--transform", "--json", "--trace", tmp_path / "trace.json"]
    words += ["--batch-size", "2", "--crop", "32", "--steps", "1", "--uncounted", "0", "--rounds", "1"]
    ended = run_python(BENCHMARKS / "train_step.py", make_set(9, (40, 40, 3)), *words, **NO_GPU)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    for times in (found["mean_step_seconds"], found["median_step_seconds"]):
        assert list(times) == ["one batch", "loader"]
        assert all(seconds > 0 for seconds in times.values())
    assert len(found["losses"]) == 1
    # The one batch, and those of two rounds and of the trace.
    assert found["stats"]["batches"] == 1 + 2 + 1
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
