"""examples/: the recipe does what it says, run as its reader runs it, on a small set that can be learned."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shlex
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from documents import code_blocks
from places import IMAGENET, ROOT
from starts import Starts

from shardio import ShardWriter
from shardio.cli.convert import convert

# 12 steps of 8 and a rest. In the validation's last batch on two ranks, one has a sample and the other none.
NUM_TRAIN, NUM_VAL = 100, 33
STEPS, EPOCHS = 12, 3
SIZES = ["--batch-size", "8", "--size", "64", "--first-size", "32", "--eval-size", "32"]
RECIPE = [*SIZES, *f"--model small --epochs {EPOCHS} --warmup-epochs 1 --lr 0.2 --ema 0.5 --min-area 0.35".split()]
MIXED = [*RECIPE, "--mixup", "0.2", "--cutmix", "1"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A class is the channel that is brightest."""
    out = tmp_path_factory.mktemp("examples") / "shards"
    rng = np.random.default_rng(0)
    with ShardWriter(out, (40, 48, 3), classes=["red", "green", "blue"]) as writer:
        for split, count in (("train", NUM_TRAIN), ("val", NUM_VAL)):
            for i in range(count):
                image = rng.integers(0, 80, (40, 48, 3), dtype=np.uint8)
                image[..., i % 3] += 80
                writer.append(image, i % 3, split=split)
    return out


def succeed(starts: Starts, shards: Path, run: Path, *options: str, ranks: int = 0) -> None:
    """Runs the recipe, by a launcher of our own if there are ranks."""
    codes = starts.run(IMAGENET / "train.py", shards, run, *options, folder=run.parent, ranks=ranks)
    assert not any(codes), starts.said()


def interrupt(starts: Starts, shards: Path, run: Path, *options: str, ranks: int = 0) -> None:
    """Runs, and sends SIGTERM to all ranks when the folder is made, as all handle it by then."""
    words = [shards, run, *options, "--log-steps", "1"]
    codes = starts.run(IMAGENET / "train.py", *words, folder=run.parent, ranks=ranks, term=run)
    assert set(codes) == {os.EX_TEMPFAIL}, starts.said()


def log_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="ascii").splitlines()]


def checkpoint_of(run: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(run / "checkpoint.pt", weights_only=True)
    return state


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{name}/{key}")
    else:
        yield name, value


def assert_same_bits(run: Path, other: Path) -> None:
    """Checks that two checkpoints are equal in weights, average, momenta and place."""
    here, there = (dict(leaves(checkpoint_of(folder))) for folder in (run, other))
    assert here.keys() == there.keys()
    unlike = [
        name
        for name, value in here.items()
        if not (torch.equal(value, there[name]) if isinstance(value, torch.Tensor) else value == there[name])
    ]
    assert not unlike


@pytest.fixture(scope="module")
def undisturbed(shards: Path, starts: Starts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    succeed(starts, shards, run, *MIXED, "--profile", "2")
    return run


@pytest.fixture(scope="module")
def undisturbed_pair(shards: Path, starts: Starts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("pair") / "run"
    succeed(starts, shards, run, *RECIPE, ranks=2)
    return run


def test_it_learns_and_evaluates_each_sample_once_after_each_epoch(undisturbed: Path) -> None:
    lines = log_of(undisturbed)
    evaluations = [line for line in lines if "top1" in line]
    assert [line["images_seen"] for line in evaluations] == [NUM_TRAIN * (epoch + 1) for epoch in range(EPOCHS)]
    assert {line["eval_images"] for line in evaluations} == {NUM_VAL}
    assert evaluations[-1]["top1"] > 0.9  # chance would give 1 / 3
    assert {int(line["epoch"]): line["size"] for line in lines if "size" in line} == {0: 32, 1: 32, 2: 64}


def test_a_trace_shows_the_steps_that_were_asked_for(undisturbed: Path) -> None:
    events = json.loads((undisturbed / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    names = [event.get("name") for event in events if event.get("ph") == "X"]
    assert sum(name.startswith("ProfilerStep#") for name in names) == 2
    assert names.count("shardio.transform") == 2


def test_stopped_by_a_signal_and_by_a_limit_it_ends_in_the_same_bits(
    shards: Path, undisturbed: Path, starts: Starts, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    interrupt(starts, shards, run, *MIXED)
    steps = len(log_of(run))
    assert checkpoint_of(run)["loader"]["consumed"] == steps * 8
    assert 0 < steps < STEPS
    succeed(starts, shards, run, *MIXED, "--stop-after", str(STEPS))  # in the next epoch
    place = checkpoint_of(run)["loader"]
    assert (place["epoch"], place["consumed"]) == (1, steps * 8)
    succeed(starts, shards, run, *MIXED)
    assert_same_bits(run, undisturbed)
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint.pt", "log.jsonl"]


def test_two_ranks_stopped_by_a_signal_end_in_the_same_bits(
    shards: Path, undisturbed_pair: Path, starts: Starts, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    interrupt(starts, shards, run, *RECIPE, ranks=2)
    place = checkpoint_of(run)["loader"]
    assert (place["epoch"], place["consumed"]) == (0, len(log_of(run)) * 16)
    succeed(starts, shards, run, *RECIPE, ranks=2)
    assert_same_bits(run, undisturbed_pair)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The example's modules, in this process."""
    monkeypatch.syspath_prepend(str(IMAGENET))
    names = ("recipe", "report", "resnet", "train")
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        del sys.modules[name]


def train_here(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> bool:
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
    options = modules["recipe"].parse("")
    finished: bool = modules["train"].train(*options, torch.device("cpu"), threading.Event())
    return finished


def test_ranks_together_evaluate_what_one_process_does(
    shards: Path, undisturbed_pair: Path, modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    (*_, before) = log_of(undisturbed_pair)
    # A finished run is only evaluated, and 12 steps of 8 are as far as 6 of 16.
    assert train_here(modules, monkeypatch, shards, undisturbed_pair, *RECIPE)
    (*_, after) = log_of(undisturbed_pair)
    assert before["eval_images"] == after["eval_images"] == NUM_VAL
    assert before["top1"] == after["top1"]
    assert before["eval_loss"] == pytest.approx(after["eval_loss"], rel=1e-4)


def test_another_recipe_does_not_go_on_from_a_checkpoint(
    shards: Path, undisturbed: Path, modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=r"made with lr 0\.2: go on with that, or choose another folder"):
        train_here(modules, monkeypatch, shards, undisturbed, *MIXED, "--lr", "0.5")


# --- the page, and tests that need no run -----------------------------------------------------------------------------


@pytest.fixture
def recipe(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["recipe"]


def test_the_commands_of_the_page_are_understood(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    blocks = code_blocks(page, "bash")
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    trainings = [line.partition("train.py ")[2].partition("&&")[0] for line in lines if "train.py " in line]
    assert len(trainings) == 7
    monkeypatch.setattr(recipe, "find_spec", lambda name: name)
    for words in trainings:
        monkeypatch.setattr(sys, "argv", ["train.py", *shlex.split(words)])
        recipe.parse("")
    (conversion,) = (shlex.split(line) for line in lines if line.startswith("shardio "))
    assert convert.make_context("convert", conversion[2:]).params["fit"] == "squash"


def test_crops_grow_over_three_quarters_of_the_epochs(recipe: ModuleType) -> None:
    growing = recipe.Recipe(epochs=16, size=224, first_size=128)
    assert [growing.image_size(epoch) for epoch in range(16)] == [*[128] * 4, *[160] * 4, *[192] * 4, *[224] * 4]
    growing = recipe.Recipe(epochs=7, size=224, first_size=100)
    assert (growing.image_size(0), growing.image_size(6)) == (100, 224)
    assert {recipe.Recipe(epochs=9).image_size(epoch) for epoch in range(9)} == {224}


def test_the_learning_rate_rises_from_0_and_falls_to_0(recipe: ModuleType) -> None:
    rate = recipe.Recipe(epochs=90, lr=0.1, warmup_epochs=5).learning_rate
    assert [rate(progress, 1024) for progress in (0, 2.5, 5, 47.5, 90)] == pytest.approx([0, 0.2, 0.4, 0.2, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tensorboard", "--tensorboard needs a package that is not installed: pip install tensorboard"),
        ("--epochs 5", "expected 0 <= warmup epochs < epochs; found 5.0, 5"),
        ("--size 128 --first-size 160", "expected crops that grow; found sizes from 160 to 128"),
        ("--log-steps 0", "--batch-size, --log-steps and --checkpoint-steps must be at least 1"),
    ],
)
def test_options_that_cannot_be_are_told(
    recipe: ModuleType,
    arguments: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "shards", "run", *arguments.split()])
    monkeypatch.setattr(recipe, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        recipe.parse("")
    assert message in capsys.readouterr().err
