"""Training under torchrun, killed and resumed: a short form of kill_train.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import setitem
from pathlib import Path
from typing import Any

import kill_train as tool
import pytest


def test_two_processes_killed_and_resumed_with_three_read_the_samples_of_one(tmp_path: Path) -> None:
    counts = tool.kill_training(1, seed=20, folder=tmp_path)
    assert not counts.violations, "\n".join(counts.violations)
    assert counts.runs == 2
    assert counts.kills == counts.resumed == 1
    assert counts.empty > 0
    assert not tool.marked_processes(tmp_path)
    assert not list(tmp_path.iterdir())


def steps(number: int, consumed: int, *parts: Sequence[int]) -> list[Any]:
    """One step as its ranks log it."""
    state = {"epoch": 0, "consumed": consumed}
    return [
        tool.Step(number, dict(state), list(part), list(part), [i % tool.NUM_CLASSES for i in part]) for part in parts
    ]


EXPECTED = [[7, 4, 0, 1, 8]]


@pytest.fixture
def runs() -> list[Any]:
    """Two ranks, killed after the checkpoint of the first step, one in the second step; and three that go on."""
    first, second = steps(1, 4, [7, 4], [0, 1]), steps(2, 5, [], [8])
    rest = steps(2, 5, [], [], [8])
    return [
        tool.Stretch(2, 0, 1, [[first[0]], [first[1], second[1]]]),
        tool.Stretch(2, 1, 2, [[step] for step in rest]),
    ]


def test_what_was_received_after_the_checkpoint_does_not_count(runs: list[Any]) -> None:
    assert tool.faults_of(runs, EXPECTED) == []


def at(runs: list[Any], run: int, rank: int) -> Any:
    """The first step of a rank in a run."""
    return runs[run].logs[rank][0]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda runs: at(runs, 1, 2).indices.clear(), "not the order of one process; skipped [8], 0 came again"),
        (lambda runs: at(runs, 1, 2).indices.append(7), "not the order of one process; skipped [], 1 came again"),
        (lambda runs: at(runs, 0, 0).indices.reverse(), "not the order of one process; skipped [], 0 came again"),
        (lambda runs: [at(runs, 1, rank).state.update(epoch=1) for rank in range(3)], "epochs 0 to 0, found [0, 1]"),
        (lambda runs: runs[1].logs[1].clear(), "run 1: rank 1 has not the steps 2 to 2, each once"),
        (lambda runs: at(runs, 0, 1).state.update(consumed=3), "run 0, epoch 0, step 1: the ranks' states differ"),
        (lambda runs: [at(runs, 0, rank).state.update(consumed=3) for rank in range(2)], "the state says 3"),
        (lambda runs: at(runs, 0, 0).indices.append(at(runs, 0, 1).indices.pop(0)), "batches of [3, 1]"),
        (lambda runs: setitem(at(runs, 1, 2).pixels, 0, -1), "rank 2 received pixels of [-1] as [8]"),
        (lambda runs: setitem(at(runs, 1, 2).labels, 0, 0), "rank 2 received labels [0] for [8]"),
    ],
)
def test_a_fault_is_noticed(runs: list[Any], change: Callable[[list[Any]], object], fault: str) -> None:
    change(runs)
    faults = tool.faults_of(runs, EXPECTED)
    assert any(fault in one for one in faults), faults


def test_pixels_that_are_no_samples_are_known() -> None:
    pixels = tool.pixels_of(300)
    assert tool.index_of(pixels) == 300
    pixels[-1, -1, -1] ^= 1
    assert tool.index_of(pixels) == -1
