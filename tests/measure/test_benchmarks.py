"""The benchmarks on a CPU run, and compute their results right from what they measure."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from command import NO_GPU, printed_by, run_python
from places import BENCHMARKS
from simulated_cuda import Simulation

from shardio.augment.batch import Batch
from shardio.augment.boxes import Draws
from shardio.conversion.convert import convert
from shardio.reading.shardset import open_shards


def test_augmentation_is_compared_with_what_is_there(make_set: Callable[..., Path], tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.write_text("#!/bin/sh\necho '9.9|uint8|ColorJitter, quick'\nwhile read way; do echo 5; done\n")
    library.chmod(0o755)
    path = make_set(9, (20, 24, 3))
    sizes = ["--samples", 5, "--batch-size", 2, "--size", 8, "--rounds", 1]
    sizes += ["--albumentations-python", library, "--kornia-python", library]
    sizes += ["--ffcv-python", path / "no such file", "--torchvision-python", path / "no such file"]
    lines = printed_by(BENCHMARKS / "augment.py", path, *sizes, **NO_GPU).splitlines()
    assert any(line.startswith("ffcv: not measured: ") for line in lines)
    measured = [line.partition(" images/s")[0].split() for line in lines if "images/s" in line]
    assert all(float(words[-4].replace(",", "")) > 0 for words in measured)
    names = [" ".join(words[:-4]) for words in measured]
    for output in ("uint8", "float32"):
        ways = {f"{output}: shardio", f"{output}: Pillow"}
        assert {*ways, f"ShardLoader, {output}, 2 gather threads"} < set(names)
    for chain in ("ColorJitter", "RandAugment", "RandomErasing"):
        assert {f"{chain}: shardio", f"{chain}: shardio, crop and flip alone"} < set(names)
    assert {"uint8: albumentations 9.9", "ColorJitter: albumentations 9.9, quick"} < set(names)
    assert "RandAugment: albumentations 9.9: not measured: it has none" in lines
    assert "uint8: kornia 9.9" in names


def test_each_operation_is_measured() -> None:
    printed = printed_by(BENCHMARKS / "pixels.py", "--batch-size", 8, "--size", 32, "--rounds", 1, **NO_GPU)
    names = {line.partition("  ")[0] for line in printed.splitlines()}
    assert {"the same, bicubic", "perspective, pillow's bicubic"} < names


def test_a_library_that_does_not_work_is_left_out_with_its_reason(
    module: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("def set_num_threads(number): pass")  # the real one takes seconds
    (tmp_path / "ffcv").mkdir()
    (tmp_path / "ffcv" / "__init__.py").write_text("print('hello'); raise ImportError('no OpenCV\\nis here')")
    np.save(tmp_path / "samples.npy", np.zeros((2, 8, 8, 3), np.uint8))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    augment = module("augment")
    with pytest.raises(augment.PeerError, match=r"^ImportError: no OpenCV is here$"):
        augment.Peer(sys.executable, "ffcv", tmp_path / "samples.npy", 2, 1, 4)
    with pytest.raises(augment.PeerError, match="without a word"):
        augment.Peer("true", "ffcv")


def test_a_loader_for_a_gpu_is_measured_beside_bare_copies(
    make_set: Callable[..., Path], module: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_set(9, (20, 24, 3))
    options = argparse.Namespace(size=8, batch_size=4, rounds=2, batches=2)
    with Simulation():
        module("augment").measure_device_loader(path, open_shards(path), options, torch.device("cuda:0"))
    names = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert names[0] == "bare pinned copies"
    assert any(name.startswith("ShardLoader, bfloat16") for name in names)


def test_accuracies_of_shards_and_jpegs_are_compared(image_tree: Path, tmp_path: Path) -> None:
    small = ["--seeds", 2, "--epochs", 1, "--batch-size", 4, "--size", 16, "--stored", 24]
    small += ["--narrow", 20, "--threads", 1, "--out", tmp_path / "out"]
    out = printed_by(BENCHMARKS / "accuracy.py", image_tree, *small, **NO_GPU)
    assert "12 images to train on, 6 to evaluate on, 3 classes; 16 x 16 pixels, crops of 0.08 to 1" in out
    own, of_jpegs = (table.splitlines() for table in out.split("\n\n")[1:])
    assert own[0].startswith("evaluated on the pictures of each way")
    assert of_jpegs[0].startswith("evaluated on JPEGs")
    for _, *lines in (own, of_jpegs):
        assert [line.partition("  ")[0] for line in lines[:3]] == ["JPEGs", "shards, crop", "shards, squash"]
        assert [line.partition(":")[0] for line in lines[3:]] == ["shards, crop - JPEGs", "shards, squash - JPEGs"]


def test_what_is_evaluated_is_the_same_from_files_and_shards(
    image_tree: Path, tmp_path: Path, module: Callable[[str], ModuleType]
) -> None:
    accuracy, scale = module("accuracy"), (0.08, 1.0)
    convert(image_tree, tmp_path / "out", size=96, fit="squash")
    with ThreadPoolExecutor(1) as pool:
        ((images, labels),) = accuracy.way_of_jpegs(image_tree, 16, scale, 4, pool, torch.Tensor.contiguous).val
    (shards,) = accuracy.way_of_shards(tmp_path / "out", 16, scale, 4, []).val
    order = np.argsort(open_shards(tmp_path / "out", "val").index["key"])
    assert torch.equal(shards[1][order], labels)
    # The values have a standard deviation of about 1, and were resampled once more.
    assert (shards[0][order] - images).abs().mean() < 0.05


def test_intervals_are_those_of_students_t(module: Callable[[str], ModuleType]) -> None:
    assert module("accuracy").interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 4.30 / 3**0.5))


def test_operations_are_compared_where_the_other_libraries_are(image_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()  # the real one takes seconds
    (tmp_path / "torchvision.py").write_text("raise ImportError('it is not here')")
    (tmp_path / "empty").mkdir()
    for folder, environ, code, said in (
        (image_tree, {"PYTHONPATH": str(tmp_path)}, 2, "torchvision cannot be used in the environment of"),
        (tmp_path / "empty", {}, 1, f"there are no JPEG or PNG pictures in {tmp_path / 'empty'}"),
    ):
        ended = run_python(BENCHMARKS / "compare_torchvision.py", folder, **environ, **NO_GPU)
        assert (ended.returncode, said in ended.stderr) == (code, True)


def test_each_operation_that_is_compared_changes_pictures_and_has_its_own_title(
    module: Callable[[str], ModuleType],
) -> None:
    compare = module("compare_torchvision")
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (1, 3, 24, 24), np.uint8))
    batch = Batch(images, Draws(0, 0, np.arange(1)), np.array([[24, 24]]))
    titles, unchanged = [], []
    for cases in (compare.of_torchvision(), compare.of_pillow(), compare.of_policies(), compare.of_timm()):
        some = list(cases)
        titles += [(case.library, case.title) for case in some]
        for case in some[::7]:
            found = case.ours(batch).finished().images
            assert found.shape == images.shape
            if torch.equal(found, images):
                unchanged.append(case.title)
    assert len(set(titles)) == len(titles) > 400
    assert len(unchanged) < 12
    black, gray = np.zeros((2, 4, 4, 3), np.uint8), np.full((2, 4, 4, 3), 51, np.uint8)
    assert compare.psnr(black, gray) == pytest.approx(20 * np.log10(5))
    assert [compare.text_of(value) for value in (np.inf, 12.345)] == ["same", "12.3"]


def test_processes_share_the_pages_of_a_set_and_have_little_of_their_own(make_set: Callable[..., Path]) -> None:
    path = make_set(60, (160, 160, 3), 20)
    words = ("--processes", "2", "--batch-size", "30", "--rounds", "1", "--seconds", "0.02", "--json")
    found: dict[str, Any] = json.loads(printed_by(BENCHMARKS / "share.py", path, *words))
    assert [result["processes"] for result in found["results"]] == [1, 2]
    pixels = 60 * 160 * 160 * 3  # the headers of shards may be out of memory
    for result in found["results"]:
        assert pixels <= result["set"] <= 1.1 * found["split_nbytes"]  # and the index
        assert result["ring"] >= result["processes"] * 2 * 30 * 160 * 160 * 3
        assert result["private"] < found["most_private"] == 30_000_000
        assert result["pss"] > result["set"] + result["ring"]
        assert min(result["read_rates"] + result["memcpy_rates"]) > 0


def test_the_cost_of_a_check_is_told_as_a_ratio(make_set: Callable[..., Path]) -> None:
    text = printed_by(
        BENCHMARKS / "check.py", make_set(60, (64, 64, 3), 20), "--batch-size", "8", "--batches", "9", "--rounds", "2"
    )
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["off", "sample", "off", "sample"]


def test_the_costs_of_a_large_set_are_measured_in_processes_of_their_own() -> None:
    lines = printed_by(BENCHMARKS / "scale.py", "--most", "10000", "--rounds", "1").splitlines()
    assert [word.replace(",", "") for word in lines[-1].split()[:2]] == ["10000", "32"]
