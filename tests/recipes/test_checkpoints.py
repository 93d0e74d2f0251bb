"""Checkpoints of the recipes are whole or absent: each is killed at calls that change its files, and goes on."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from documents import BATCH_SIZE, BLOCKS, RECORDER
from places import IMAGENET
from starts import Starts, needs

NUM_TRAIN, NUM_VAL = 14 * BATCH_SIZE, 3


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
    "torch DDP": BLOCKS["torch DDP"][0] + keep("model.parameters()"),
    "Lightning": "\n".join(BLOCKS["Lightning"]) + keep("trainer.model.parameters()"),
    "Accelerate": f"{BLOCKS['Accelerate'][0]}\nassert sorted(right) == list(range({NUM_VAL}))"
    + keep("model.parameters()"),
    "example": EXAMPLE + keep("torch.load('checkpoints/checkpoint.pt', weights_only=True)['model'].values()"),
}


@pytest.fixture(scope="module")
def set_path(labeled_set: Callable[[int, int], Path]) -> Path:
    return labeled_set(NUM_TRAIN, NUM_VAL)


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
    weights = [torch.load(folder / f"weights-{rank}.pt", weights_only=True) for folder in (resumed, whole)]
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True)), when
    files = [sorted(path.relative_to(folder) for path in folder.rglob("checkpoint*/**")) for folder in (resumed, whole)]
    assert files[0] == files[1], when


@pytest.mark.parametrize(("name", "ranks"), [*((name, 1) for name in RECIPES), ("torch DDP", 2), ("Accelerate", 2)])
def test_a_recipe_killed_at_any_call_goes_on_as_if_it_had_not_been(
    name: str, ranks: int, set_path: Path, starts: Starts, tmp_path: Path
) -> None:
    if name in ("Lightning", "Accelerate"):
        needs(name.lower())
    script = tmp_path / "train.py"
    script.write_text(RECORDER + RECIPES[name], encoding="utf-8")

    def make_folder(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "out").symlink_to(set_path)
        return folder

    def run(folder: Path, rank: int | None = None, call: int = 0, kept: Path | None = None) -> list[int]:
        return starts.run(script, folder=folder, ranks=ranks, kill=(rank, call), kept=kept)

    # A single process leaves the same files if it is killed as if it goes on while its folder is copied, which needs
    # one run for all calls. Several ranks are not at the same place in each run.
    kept = tmp_path / "kept" if ranks == 1 else None
    whole = make_folder("undisturbed")
    assert run(whole, kept=kept) == [0] * ranks, starts.said()
    if kept:
        whole = whole.rename(tmp_path / "whole")  # what goes on must lie where it began
    for rank in range(ranks):
        assert_synced(calls_of(whole, rank))
        calls = [call for call in calls_of(whole, rank) if not call.startswith("sync ")]
        renames = [number for number, call in enumerate(calls) if call.startswith("os.rename ")]
        if not renames:  # the other rank does that
            chosen = range(len(calls) - 1)[:1]
        else:
            # The second checkpoint is the first that replaces another. The third begins as the second did.
            last = next(i for i in range(renames[1], renames[2]) if calls[i].startswith("write "))
            chosen = range(renames[0], last) if ranks == 1 else (renames[0], renames[0] + 1, renames[1])
        for number in chosen:
            if kept:
                folder = (kept / str(number)).rename(tmp_path / "undisturbed")
            else:
                folder = make_folder(f"{rank}-{number}")
                assert run(folder, rank, number)[rank] == -signal.SIGKILL, starts.said()
            assert run(folder) == [0] * ranks, f"{calls[number]}: {starts.said()}"
            for other in range(ranks):
                assert_same(folder, whole, other, f"rank {rank} killed at {calls[number]}")
            shutil.rmtree(folder)
