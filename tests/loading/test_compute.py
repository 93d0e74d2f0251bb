"""compute_array: the same array for any number of ranks, whenever they are killed, and never a part of one."""

from __future__ import annotations

import inspect
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import random_picture

import shardio.loading.compute as module
from shardio import (
    ConvertError,
    LaunchError,
    ShardioError,
    ShardLoader,
    ShardWriter,
    SpaceError,
    change,
    compute_array,
)
from shardio.augment import Compose, Normalize, RandomCrop
from shardio.format.manifest_file import load_manifest

COUNT = 103
BATCH = 8
CALL: dict[str, Any] = {"tag": "model 1", "dtype": "float16", "shape": (3, 2), "batch_size": BATCH, "device": "cpu"}


def encode(images: torch.Tensor) -> torch.Tensor:
    """Stands for a model whose result depends on the composition of a batch."""
    means = images.float().mean(dim=3)[:, :, :2]
    return means - means.mean()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compute") / "set"
    rng = np.random.default_rng(1)
    with ShardWriter(folder, (12, 10, 3), classes=["a", "b"], shard_nbytes=9000) as writer:
        for i in range(COUNT):
            writer.append(random_picture(rng, 12, 10), i % 2)
    return folder


@pytest.fixture(scope="module")
def expected(out: Path) -> np.ndarray[Any, Any]:
    with ShardLoader(out, BATCH, device="cpu", shuffle=False, tail="short") as loader:
        return torch.cat([encode(images) for images, _ in loader]).to(torch.float16).numpy()


def values_of(new: Path, name: str = "latent") -> np.ndarray[Any, Any]:
    with ShardLoader(new, 1, device="cpu", shuffle=False, arrays=[name], images=None) as loader:
        return np.concatenate([batch[-1][name].numpy() for batch in loader])


def left_in(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("."))


def test_the_array_is_that_of_a_change_with_the_same_values(
    out: Path, expected: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    report = compute_array(out, tmp_path / "new", "latent", encode, **CALL)
    change(out, tmp_path / "other", arrays={"latent": expected})
    assert report is not None
    assert report.digest == load_manifest(tmp_path / "new").digest == load_manifest(tmp_path / "other").digest
    assert np.array_equal(values_of(tmp_path / "new"), expected)
    assert left_in(tmp_path) == []
    recorded = load_manifest(tmp_path / "new").provenance["change"]
    assert (recorded["operation"], recorded["arguments"]["tag"]) == ("compute_array", "model 1")


def test_a_finished_call_returns_at_once_and_another_call_is_refused(out: Path, tmp_path: Path) -> None:
    compute_array(out, tmp_path / "new", "latent", encode, **CALL)

    def fail(images: torch.Tensor) -> torch.Tensor:
        raise AssertionError("called again")

    assert compute_array(out, tmp_path / "new", "latent", fail, **CALL) is None
    with pytest.raises(ConvertError, match="new"):
        compute_array(out, tmp_path / "new", "latent", fail, **{**CALL, "tag": "model 2"})


@pytest.mark.parametrize(
    ("result", "dtype"),
    [
        (lambda images: encode(images).bfloat16(), "float32"),
        (lambda images: encode(images).numpy(), "float16"),
        (lambda images: images[:, :, 0, :2].long(), "uint8"),
        (lambda images: images[:, :, :2, 0] > 100, "bool"),
    ],
)
def test_results_are_cast(out: Path, tmp_path: Path, result: Any, dtype: str) -> None:
    if dtype == "uint8":  # not without loss
        with pytest.raises(ValueError, match="samples 0 to 7"):
            compute_array(out, tmp_path / "new", "latent", result, **{**CALL, "dtype": dtype})
        return
    compute_array(out, tmp_path / "new", "latent", result, **{**CALL, "dtype": dtype})
    assert values_of(tmp_path / "new").dtype == dtype
    assert values_of(tmp_path / "new").shape == (COUNT, 3, 2)


def test_a_result_for_each_sample_may_be_one_number(out: Path, tmp_path: Path) -> None:
    compute_array(
        out, tmp_path / "new", "score", lambda images: images.float().mean((1, 2, 3)), **{**CALL, "shape": ()}
    )
    assert values_of(tmp_path / "new", "score").shape == (COUNT,)


@pytest.mark.parametrize(
    ("word", "function", "options"),
    [
        ("expected float16", lambda images: images.float(), {}),
        ("expected float16", lambda images: encode(images)[1:], {}),
        ("expected float16", lambda images: None, {}),
        ("finite", lambda images: encode(images) * torch.nan, {}),
        ("finite", lambda images: encode(images) * 1e9, {}),
        ("tag", encode, {"tag": ""}),
        ("batch_size", encode, {"batch_size": 0}),
        ("split", encode, {"split": "val"}),
        ("name", encode, {"name": "a b"}),
    ],
)
def test_what_cannot_become_the_array_is_refused(
    out: Path, tmp_path: Path, word: str, function: Any, options: dict[str, Any]
) -> None:
    options = {"name": "latent", **CALL, **options}
    with pytest.raises((ValueError, ShardioError), match=word):
        compute_array(out, tmp_path / "new", function=function, **options)
    assert not (tmp_path / "new").exists()


def test_the_transform_comes_first_and_belongs_to_the_computation(out: Path, tmp_path: Path) -> None:
    crop = Compose([RandomCrop(6), Normalize("imagenet")])
    seen = []

    def note(images: torch.Tensor) -> torch.Tensor:
        seen.append((images.dtype, images.shape[2:], torch.is_grad_enabled()))
        return encode(images)

    compute_array(out, tmp_path / "new", "latent", note, transform=crop, **CALL)
    assert {*seen} == {(torch.float32, (6, 6), False)}
    assert compute_array(out, tmp_path / "new", "latent", note, transform=crop, **CALL) is None  # it is the same
    with pytest.raises(TypeError, match="transform"):
        compute_array(out, tmp_path / "b", "latent", note, transform=lambda images: images, **CALL)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("word", "options"),
    [
        ("tag", {"tag": "model 2"}),
        ("dtype", {"dtype": "float32"}),
        ("shape", {"shape": (2, 3)}),
        ("batch_size", {"batch_size": 9}),
        ("transform", {"transform": RandomCrop(6)}),
        ("name", {"name": "other"}),
    ],
)
def test_a_resume_with_another_argument_is_refused(
    out: Path, tmp_path: Path, word: str, options: dict[str, Any]
) -> None:
    calls = iter([encode, encode])

    def stop(images: torch.Tensor) -> torch.Tensor:
        return next(calls)(images)

    first = {"name": "latent", **CALL}
    with pytest.raises(StopIteration):
        compute_array(out, tmp_path / "new", function=stop, **first)
    with pytest.raises(ConvertError, match=rf"{word}.*start over"):
        compute_array(out, tmp_path / "new", function=encode, **{**first, **options})
    compute_array(out, tmp_path / "new", function=encode, **first)
    assert left_in(tmp_path) == []


def test_a_set_of_several_splits_needs_the_split(out: Path, tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set", (12, 10, 3), classes=["a"]) as writer:
        for split in ("train", "val"):
            writer.append(np.zeros((12, 10, 3), np.uint8), 0, split=split)
    with pytest.raises(ConvertError, match="split="):
        compute_array(tmp_path / "set", tmp_path / "new", "latent", encode, **CALL)
    compute_array(tmp_path / "set", tmp_path / "new", "latent", encode, split="val", **CALL)
    assert list(load_manifest(tmp_path / "new").splits["val"].arrays) == ["latent"]


def test_a_disk_that_is_too_full_is_noticed_before_hours_are_spent(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(SpaceError, match="free"):
        compute_array(out, tmp_path / "new", "latent", encode, **CALL)


def test_ranks_do_not_wait_for_ever_and_say_for_whom(out: Path, tmp_path: Path) -> None:
    options = {**CALL, "world_size": 3, "timeout_seconds": 0.3}
    with pytest.raises(LaunchError, match=r"rank 0 waited.*rank 1, 2.*resumes"):
        compute_array(out, tmp_path / "new", "latent", encode, rank=0, **options)
    with pytest.raises(LaunchError, match=r"rank 1 waited.*rank 2.*resumes"):
        compute_array(out, tmp_path / "new", "latent", encode, rank=1, **options)
    assert compute_array(out, tmp_path / "new", "latent", encode, **CALL) is not None  # on one rank


# --- ranks as processes -----------------------------------------------------------------------------------------------

WORKER = """
import json, sys, time
import torch
from shardio import compute_array

{encode}

def slow(images):
    with open(sys.argv[3], "a") as file:
        file.write("call\\n")
    time.sleep(0.05)
    return encode(images)

report = compute_array(sys.argv[1], sys.argv[2], "latent", slow, timeout_seconds=30, **{call})
print(json.dumps(report and report.digest))
"""


def start(out: Path, new: Path, rank: int, world_size: int) -> subprocess.Popen[str]:
    environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size)}
    script = WORKER.replace("{encode}", inspect.getsource(encode)).replace("{call}", repr(CALL))
    command = [sys.executable, "-c", script, str(out), str(new), str(new.parent / "calls")]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_of_ranks_computes_the_same_bytes(
    out: Path, expected: np.ndarray[Any, Any], tmp_path: Path, world_size: int
) -> None:
    ranks = [start(out, tmp_path / "new", rank, world_size) for rank in range(world_size)]
    reports = [json.loads(rank.communicate(timeout=100)[0]) for rank in ranks]
    assert reports == [load_manifest(tmp_path / "new").digest, *[None] * (world_size - 1)]
    assert np.array_equal(values_of(tmp_path / "new"), expected)
    assert (tmp_path / "calls").read_text().count("call") == -(-COUNT // BATCH)
    assert left_in(tmp_path) == []


def test_ranks_that_are_killed_five_times_at_random_moments_lose_only_their_last_batch(
    out: Path, expected: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}")
    rng = random.Random(seed)
    killed = 0
    while killed < 5 and not (tmp_path / "new").exists():
        ranks = [start(out, tmp_path / "new", rank, 2) for rank in range(2)]
        before = (tmp_path / "calls").read_text().count("call") if killed else 0
        while not (tmp_path / "calls").exists() or (tmp_path / "calls").read_text().count("call") == before:
            time.sleep(0.01)
            if any(rank.poll() is not None for rank in ranks):
                break
        time.sleep(rng.uniform(0, 0.15))
        for rank in rng.sample(ranks, 2):
            rank.kill()
        for rank in ranks:
            rank.communicate()
        killed += 1
    assert killed == 5
    last = [start(out, tmp_path / "new", rank, 2) for rank in range(2)]
    for rank in last:
        rank.communicate(timeout=100)
        assert rank.returncode == 0
    assert np.array_equal(values_of(tmp_path / "new"), expected)
    assert (tmp_path / "calls").read_text().count("call") <= -(-COUNT // BATCH) + 5 * 2
    assert left_in(tmp_path) == []
