"""A machine with a GPU, and a torch without CUDA: the tests do not pass by skipping what they are there for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command import run_forked
from environment import why_gpus_are_not_tested
from places import ROOT


@pytest.fixture
def made_up_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'GPU 0: Made up'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.usefixtures("made_up_gpu")
def test_a_gpu_that_torch_does_not_see_fails_the_tests() -> None:
    code = "import sys, pytest; sys.exit(pytest.main(['-p', 'no:cacheprovider', '--collect-only', '-q', sys.argv[1]]))"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}  # torch sees none, where there are any
    run = run_forked("-c", code, __file__, cwd=ROOT, env=env, timeout=300)
    said = run.stdout + run.stderr
    assert run.returncode == 1, said
    assert "nvidia-smi lists GPU 0: Made up" in said
    assert "test_a_gpu" not in said


def test_tests_of_a_gpu_are_collected_without_simplejpeg() -> None:
    code = """if True:
        import sys, pytest
        sys.modules["simplejpeg"] = None
        sys.exit(pytest.main(["-p", "no:cacheprovider", "--collect-only", "-q", "-m", "gpu", *sys.argv[1:]]))
    """
    names = [str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8")]
    run = run_forked("-c", code, *names, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "test_every_byte" in run.stdout


@pytest.mark.usefixtures("made_up_gpu")
def test_gpus_that_were_hidden_on_purpose_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert why_gpus_are_not_tested() is None
