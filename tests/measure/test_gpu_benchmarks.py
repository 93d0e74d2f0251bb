"""The benchmarks for GPUs run, or say why they do not. Their results on a GPU cannot be tested here."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from command import NO_GPU, printed_by, run_python
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
    strided = [layer.kernel_size for layer in model.modules() if getattr(layer, "stride", 1) == (2, 2)]
    assert strided.count((3, 3)) == 3


@pytest.mark.parametrize("command", [["train_step.py"], ["augment.py", "--device", "cuda"], ["all_gpu.py"]])
def test_without_a_gpu_there_is_one_line_and_exit_code_2(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError")  # for other processes: the real one takes seconds
    ended = run_python(BENCHMARKS / command[0], *command[1:], PYTHONPATH=str(tmp_path), **NO_GPU)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1
    assert "no CUDA device is here" in ended.stderr


@pytest.fixture
def all_gpu(module: Callable[[str], ModuleType]) -> ModuleType:
    return module("all_gpu")


def run(all_gpu: ModuleType, out: Path, *words: str) -> tuple[Any, dict[str, Any]]:
    """Returns with which exception it ended, and what it has written."""
    argv = ["all_gpu.py", *words, "--json", str(out)]
    with mock.patch.object(sys, "argv", argv), pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        all_gpu.main()
    return ended.value, json.loads(out.read_text())


def test_all_parts_for_a_gpu_end_within_nine_minutes_and_have_all_its_tests(all_gpu: ModuleType) -> None:
    assert sum(part.seconds for part in all_gpu.PARTS) < 9 * 60
    for part in all_gpu.PARTS:
        assert all((ROOT / word).is_file() for word in (*part.words, *part.dry) if word.endswith(".py"))
    marked = {
        path for path in (ROOT / "tests").rglob("test_*.py") if re.search(r"pytest\.mark\.gpu", path.read_text("utf-8"))
    }
    assert marked == {ROOT / name for name in all_gpu.TESTS}


def test_a_dry_run_needs_no_gpu_and_finds_no_wrong_byte(
    all_gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_part(outcome: Any, words: list[str], seconds: int, python: str, save: Callable[[], None]) -> None:
        outcome.state = "done"
        outcome.lines += printed_by(ROOT / words[0], *words[1:], **NO_GPU).splitlines()
        save()

    monkeypatch.setattr(all_gpu, "run_part", run_part)
    words = ["--dry-run", "--only", "machine", "--only", "streams", "--only", "speed"]
    ended, report = run(all_gpu, tmp_path / "gpu.json", *words)
    assert not ended.code
    summary = report["summary"]
    assert capsys.readouterr().out.count("\n".join(summary)) == 1
    for dtype in ("uint8", "float32", "bfloat16"):
        rows = [line.split(" | ")[1:] for line in summary if line.startswith(f"| {dtype}: ")]
        assert [row[0] for row in rows] in (["0", "30", "0"], ["0", "30", "0", "0"])
        assert {row[-1] for row in rows} == {"met |"}
    assert any("stored bytes to the device, of bare pinned copies" in line for line in summary)


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
    ended, report = run(all_gpu, tmp_path / "new" / "gpu.json")
    assert ended.code == 1
    assert report["machine"] == "Made up"
    assert report["summary"][-2:] == ["| bad | failed with exit code 3 | | |", "| slow | stopped after 1 s | | |"]
    states = [(part["part"], part["state"], part["lines"]) for part in report["parts"]]
    assert states == [
        ("bad", "failed with exit code 3", ["half"]),
        ("slow", "stopped after 1 s", ["begun"]),
        ("good", "done", ["all well"]),
    ]
    assert "== good: done" in capsys.readouterr().out


def test_what_is_killed_leaves_what_it_has_found(
    all_gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = json.dumps({"figure": "the only one", "found": 3, "aim": 2, "at_most": True})
    script = f"import time; print({line!r}, flush=True); time.sleep(60)"
    monkeypatch.setattr(all_gpu, "PARTS", [all_gpu.Part("slow", ("-c", script), 60)])
    monkeypatch.setattr(all_gpu, "gpu_of", lambda python: "Made up")
    replace, names = Path.replace, []

    def after_the_first_line(self: Path, target: Path) -> Path:
        names.append(replace(self, target))
        if len(names) == 2:
            raise KeyboardInterrupt
        return names[-1]

    monkeypatch.setattr(Path, "replace", after_the_first_line)
    _, report = run(all_gpu, tmp_path / "gpu.json")
    assert report["summary"][-2:] == ["| the only one | 3 | at most 2 | **missed** |", "| slow | ended early | | |"]


def test_figures_of_tests_and_a_training_are_found_in_their_lines(all_gpu: ModuleType) -> None:
    tests = [
        "tests/loading/test_gpu.py::test_one[0] PASSED                   [ 10%]",
        "tests/loading/test_gpu.py::test_two FAILED                      [ 20%]",
        "tests/loading/test_gpu.py::test_three ERROR",
        "FAILED tests/loading/test_gpu.py::test_two - AssertionError",
        "tests/loading/test_gpu.py::test_four SKIPPED (only one CUDA device)",
    ]
    losses = ["loss            0.42% (-0.10% to 0.90%), the aim is below 1%"]
    lines = all_gpu.summary("Made up", [all_gpu.Outcome("tests", "done", 1.0, tests)])[6:]
    assert lines == ["| tests passed | 1 | at least 1 | met |", "| tests failed | 2 | at most 0 | **missed** |"]
    (line,) = all_gpu.summary("Made up", [all_gpu.Outcome("training", "done", 1.0, losses)])[6:]
    assert line.endswith("| 0.42 | at most 1 | met |")


def test_the_training_loop_runs_on_a_cpu(make_set: Callable[..., Path], tmp_path: Path) -> None:
    words = ["--device", "cpu", "--transform", "--json", "--trace", tmp_path / "trace.json"]
    words += ["--batch-size", "2", "--crop", "32", "--steps", "1", "--uncounted", "0", "--rounds", "1"]
    printed = printed_by(BENCHMARKS / "train_step.py", make_set(9, (40, 40, 3)), *words, **NO_GPU)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    for times in (found["mean_step_seconds"], found["median_step_seconds"]):
        assert list(times) == ["one batch", "loader"]
        assert all(seconds > 0 for seconds in times.values())
    assert len(found["losses"]) == 1
    # The one batch, and those of two rounds and of the trace.
    assert found["stats"]["batches"] == 1 + 2 + 1
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
