"""Checkpoints of the recipes are whole or absent: each is killed at every call that changes its files, and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import pytest
import torch
from documents import BATCH_SIZE, BLOCKS, RECORDER
from killed import TIMEOUT_SECONDS
from pictures import sample_pixels
from places import IMAGENET, ROOT, SUPPORT

from shardio import ShardWriter

KILLED = SUPPORT / "killed.py"
SHAPE = (4, 4, 3)
NUM_TRAIN, NUM_VAL = 14 * BATCH_SIZE, 3


class Recipe(NamedTuple):
    script: str
    imports: tuple[str, ...]


def keep(parameters: str) -> str:
    return f"\nimport os\ntorch.save([*{parameters}], f'weights-{{os.environ[\"RANK\"]}}.pt')\n"


OPTIONS = "--batch-size 64 --checkpoint-steps 3 --model small --size 32 --epochs 1 --warmup-epochs 0"
EXAMPLE = f"""
import runpy, sys
sys.path.insert(0, {str(IMAGENET)!r})
sys.argv[1:] = "out checkpoints {OPTIONS}".split()
try:
    runpy.run_path({str(IMAGENET / "train.py")!r}, run_name="__main__")
except SystemExit as ended:
    assert not ended.code, ended.code
"""
RECIPES = {
    "torch DDP": Recipe(RECORDER + BLOCKS["torch DDP"][0] + keep("model.parameters()"), ()),
    "Lightning": Recipe(
        RECORDER + "\n".join(BLOCKS["Lightning"]) + keep("trainer.model.parameters()"), ("lightning.pytorch",)
    ),
    "Accelerate": Recipe(RECORDER + BLOCKS["Accelerate"][0] + keep("model.parameters()"), ("accelerate",)),
    "example": Recipe(
        RECORDER + EXAMPLE + keep("torch.load('checkpoints/checkpoint.pt')['model'].values()"), ("shardio.augment",)
    ),
}


@pytest.fixture(scope="module")
def set_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sample's label is its index, so that the labels of the losses are what was trained on."""
    out = tmp_path_factory.mktemp("checkpoints") / "out"
    with ShardWriter(out, SHAPE, classes=[f"c{i}" for i in range(NUM_TRAIN)]) as writer:
        for split, size in (("train", NUM_TRAIN), ("val", NUM_VAL)):
            for i in range(size):
                writer.append(sample_pixels(i, SHAPE), i, split=split)
    return out


class Starts:
    """Starts of a recipe, in folders below `folder`."""

    def __init__(self, recipe: Recipe, folder: Path, set_path: Path) -> None:
        self._folder, self._set_path = folder, set_path
        self._said = folder / "said"
        script = folder / "train.py"
        script.write_text(recipe.script, encoding="utf-8")
        settings = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        settings |= {"ACCELERATE_USE_CPU": "true", "STOP_AFTER": "0", "GLOO_SOCKET_IFNAME": "lo"}
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, str(KILLED), str(script), *recipe.imports],
                env={**os.environ, **settings},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                bufsize=1,
            )

    def __enter__(self) -> Starts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=TIMEOUT_SECONDS)  # the end of stdin is that of the process

    def make_folder(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir()
        (folder / "out").symlink_to(self._set_path)
        return folder

    def run(self, folder: Path, ranks: int, kill: tuple[int, int] | None = None) -> list[int]:
        """The ranks' exit codes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"folder": str(folder), "ranks": ranks, "kill": kill}) + "\n")
        codes: list[int] = json.loads(self._process.stdout.readline())
        return codes

    def said(self) -> str:
        return self._said.read_text(errors="replace")


def steps_of(folder: Path, rank: int) -> list[list[list[int]]]:
    """The batches that a rank has trained on, by start."""
    starts: list[list[list[int]]] = []
    for line in (folder / f"steps-{rank}.jsonl").read_text(encoding="ascii").splitlines():
        if line == "[]":
            starts.append([])
        else:
            starts[-1].append(json.loads(line))
    return starts


def calls_of(folder: Path, rank: int) -> list[str]:
    return (folder / f"calls-{rank}.txt").read_text(encoding="utf-8").splitlines()


def assert_synced(calls: Sequence[str]) -> None:
    """Checks that all writes were synced before a file got its name: a loss of power then leaves the same as a kill."""
    unsynced = set()
    for call, _, path in (call.partition(" ") for call in calls):
        if call == "write":
            unsynced.add(path)
        elif call == "sync":
            unsynced.discard(path)
        elif call == "os.rename":
            assert not unsynced, f"{path}: {unsynced}"


def assert_same(resumed: Path, whole: Path, rank: int, when: str) -> None:
    """Checks that a killed run that went on has the same samples, the same weights, and the same files."""
    (expected,) = steps_of(whole, rank)
    before, after = steps_of(resumed, rank)
    assert before == expected[: len(before)], when
    assert after == expected[len(expected) - len(after) :], when
    assert len(before) + len(after) >= len(expected), when
    weights = [torch.load(folder / f"weights-{rank}.pt") for folder in (resumed, whole)]
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True)), when
    files = [sorted(path.relative_to(folder) for path in folder.rglob("checkpoint*/**")) for folder in (resumed, whole)]
    assert files[0] == files[1], when


@pytest.mark.parametrize(("name", "ranks"), [*((name, 1) for name in RECIPES), ("torch DDP", 2), ("Accelerate", 2)])
def test_a_recipe_killed_at_any_call_goes_on_as_if_it_had_not_been(
    name: str, ranks: int, set_path: Path, tmp_path: Path
) -> None:
    for package in RECIPES[name].imports:
        pytest.importorskip(package)
    with Starts(RECIPES[name], tmp_path, set_path) as starts:
        whole = starts.make_folder("undisturbed")
        assert starts.run(whole, ranks) == [0] * ranks, starts.said()
        for rank in range(ranks):
            assert_synced(calls_of(whole, rank))
            calls = [call for call in calls_of(whole, rank) if not call.startswith("sync ")]
            renames = [number for number, call in enumerate(calls) if call.startswith("os.rename ")]
            if not renames:  # the other rank does that
                chosen = range(len(calls) - 1)[:2]
            elif ranks == 1:
                # Until the third checkpoint is renamed. The second is the first that takes the place of another.
                chosen = range(renames[2])
            else:
                chosen = range(renames[0], renames[1] + 1)
            for number in chosen:
                folder = starts.make_folder(f"{rank}-{number}")
                assert starts.run(folder, ranks, (rank, number))[rank] == -signal.SIGKILL, starts.said()
                assert starts.run(folder, ranks) == [0] * ranks, f"{calls[number]}: {starts.said()}"
                for other in range(ranks):
                    assert_same(folder, whole, other, f"rank {rank} killed at {calls[number]}")
