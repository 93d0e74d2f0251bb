"""A damaged set is never taken for a sound one: a short form of damage_set.py, and whether it would notice."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import damage_set
import pytest
from command import printed_by
from damage_set import (
    ROW_NBYTES,
    Damage,
    Site,
    open_all,
)
from disks import raising
from places import CHAOS

from shardio.errors import FormatError
from shardio.sets.verify import Problem, VerifyReport, verify

NBYTES = ROW_NBYTES


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return damage_set._make_site(tmp_path / "site", "rgb")


def test_every_damage_is_found_named_and_refused_and_nothing_is_left_behind(tmp_path: Path) -> None:
    words = ("--damages", "120", "--rounds", "10", "--seed", "5")
    printed = printed_by(CHAOS / "damage_set.py", *words, TMPDIR=str(tmp_path))
    assert printed.splitlines()[-1] == "120 damages, 0 not found or not named, 0 deaths, 0 hangs"
    assert "10 rounds of training, 0 with wrong samples" in printed
    assert os.listdir(tmp_path) == []


def without_samples(problem: Problem) -> Problem:
    return replace(problem, samples=())


def without_path(problem: Problem) -> Problem:
    return replace(problem, detail="something is damaged")


def careless(mend: Callable[[VerifyReport], VerifyReport], **options: Any) -> Callable[..., VerifyReport]:
    return lambda folder, workers: mend(verify(folder, workers=workers, **options))


def of_all(change: Callable[[Problem], Problem]) -> Callable[[VerifyReport], VerifyReport]:
    return lambda report: replace(report, problems=tuple(map(change, report.problems)))


@pytest.mark.parametrize(
    ("careless_verify", "told"),
    [
        (careless(lambda report: report, quick=True), "to be named, found"),
        (careless(lambda report: report, subset=0.2, seed=0), "to be named, found"),
        (careless(lambda report: replace(report, problems=())), "found {}"),
        (careless(lambda report: replace(report, problems=report.problems[:1])), "to be named, found"),
        (careless(of_all(without_samples)), "to be named, found"),
        (careless(of_all(without_path)), "expected the path in"),
        (
            careless(lambda report: replace(report, problems=(*report.problems, Problem("rejects.jsonl", "x", (1,))))),
            "'rejects.jsonl': (1,)",
        ),
    ],
    ids=["sizes alone", "some samples", "nothing", "one file", "no samples", "no path", "too much"],
)
def test_a_careless_verifier_is_noticed(
    careless_verify: Callable[..., VerifyReport], told: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(damage_set, "verify", careless_verify)
    wrong = [text for number in range(25) if (text := site.try_damage(site.draw(7, number)))]
    assert wrong
    assert all(told in text for text in wrong)


def test_a_careless_opening_is_noticed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = Damage("cut off", {"val-00001.npy": site.sound["val-00001.npy"][:-1]})
    flipped = Damage("one bit flipped", {"val-00001.npy": site.sound["val-00001.npy"][:-1] + b"?"})
    assert site.try_damage(cut) == site.try_damage(flipped) == ""
    monkeypatch.setattr(damage_set, "open_all", lambda folder, split: None)
    assert "expected val to be refused for ['val-00001.npy'], but it was opened" in site.try_damage(cut)
    monkeypatch.setattr(damage_set, "open_all", raising(FormatError("something is damaged")))
    assert "expected train to be refused for nothing, found something is damaged" in site.try_damage(flipped)

    def refuse_another(folder: Path, split: str) -> None:
        if split == "val":
            raise FormatError(f"{folder / 'val-00000.npy'}: is damaged")
        open_all(folder, split)

    monkeypatch.setattr(damage_set, "open_all", refuse_another)
    assert "expected val to be refused for ['val-00001.npy'], found" in site.try_damage(cut)
