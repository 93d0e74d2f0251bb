"""Benchmarks of sharing, of checking and of large sets run; and what they show of memory holds for a small set, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from command import run_python
from places import BENCHMARKS


def run(script: str, *arguments: object) -> str:
    ended = run_python(BENCHMARKS / script, *arguments)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def test_processes_share_the_pages_of_a_set_and_have_little_of_their_own(make_set: Callable[..., Path]) -> None:
    path = make_set(300, (64, 64, 3), 100)
    words = ("--processes", "2", "--batch-size", "50", "--rounds", "1", "--seconds", "0.02", "--json")
    found: dict[str, Any] = json.loads(run("share.py", path, *words))
    assert [result["processes"] for result in found["results"]] == [1, 2]
    mapped = found["split_nbytes"]
    for result in found["results"]:
        assert mapped <= result["set"] <= 1.1 * mapped  # and the index
        assert result["ring"] >= result["processes"] * 2 * 50 * 64 * 64 * 3
        assert result["private"] < found["most_private"] == 30_000_000
        assert result["pss"] > result["set"] + result["ring"]
        assert min(result["read_rates"] + result["memcpy_rates"]) > 0


def test_the_cost_of_a_check_is_told_as_a_ratio(make_set: Callable[..., Path]) -> None:
    text = run("check.py", make_set(60, (64, 64, 3), 20), "--batch-size", "8", "--batches", "9", "--rounds", "2")
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["off", "sample", "off", "sample"]


def test_the_costs_of_a_large_set_are_measured_in_processes_of_their_own() -> None:
    lines = run("scale.py", "--most", "10000", "--rounds", "1").splitlines()
    assert [word.replace(",", "") for word in lines[-1].split()[:2]] == ["10000", "32"]
