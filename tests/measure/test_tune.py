"""`shardio tune`: the race of ways of reading, on machines that are made up; and real ones, shortly."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardio.cli.main import cli
from shardio.loading.loader import ShardLoader
from shardio.measure import tune as tuning
from shardio.measure.race import best_of, choose, race, ratio
from shardio.measure.report import Combination
from shardio.measure.tune import cost_of, situation_of, tune, ways_of
from shardio.reading.choose import Facts
from shardio.reading.shardset import open_shards

DEFAULT = Combination("cpu", None, 256, "auto", None, 2)


class Machine:
    """Ways with true rates; what is measured is noisy, and for some trials in a row all are slowed down."""

    def __init__(self, seed: int, count: int) -> None:
        self.rng = random.Random(seed)
        self.rates = [self.rng.uniform(0.2, 1.0) for _ in range(count)]
        self.turns = self.slow = 0

    def measure(self, way: int, number: int) -> float:
        assert number == self.turns
        self.turns += 1
        if not self.slow and self.rng.random() < 0.05:
            self.slow = 4
        self.slow = max(self.slow - 1, 0)
        noise = math.exp(self.rng.gauss(0, 0.1))
        return self.rates[way] * noise * (0.6 if self.slow else 1.0)


def test_a_race_finds_a_way_within_five_percent_of_the_best_on_noisy_machines() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    far = 0
    for offset in range(200):
        machine = Machine(seed + offset, 24)
        rates = race(range(24), machine.measure, lambda: machine.turns >= 240, seed=offset)  # noqa: B023
        chosen = choose(rates, cost=lambda way: way)
        far += machine.rates[chosen] < 0.95 * max(machine.rates)
        assert len(rates[0]) >= max(map(len, rates.values())) - 1
    # Noise of 10 % in each trial leaves hard cases, as many ways lie close together: 3.7 % of 600 machines were missed,
    # the worst by 11 %.
    assert far <= 20


def test_a_race_lasts_a_round_at_least_and_ends_in_the_middle_of_one() -> None:
    machine = Machine(0, 5)
    assert [len(some) for some in race(range(5), machine.measure, lambda: True).values()] == [1] * 5
    machine = Machine(0, 5)
    assert sum(map(len, race(range(5), machine.measure, lambda: machine.turns >= 8).values())) == 8


def test_of_ways_that_are_about_as_fast_the_cheapest_is_chosen() -> None:
    rates = {3: [100.0] * 5, 2: [98.0] * 5, 1: [96.0] * 5, 0: [200.0]}
    assert best_of(rates) == 3
    assert choose(rates, cost=lambda way: way) == 2
    assert ratio([1.0, 2.0, 3.0], [2.0, 2.0]) == 0.75


def test_the_default_goes_before_ways_that_gain_little() -> None:
    other = Combination("cpu", None, 256, "mmap", 1, 1)
    assert choose({DEFAULT: [98.5] * 5, other: [100.0] * 5}, lambda way: cost_of(way, DEFAULT)) == DEFAULT
    assert choose({DEFAULT: [90.0] * 5, other: [100.0] * 5}, lambda way: cost_of(way, DEFAULT)) == other


@pytest.mark.parametrize(
    ("facts", "situation"),
    [
        (Facts("ext4", 100, 1.0, 50, 512), "memory"),
        (Facts("ext4", 100, 0.0, 1000, 512), "memory"),
        (Facts("ext4", 100, 0.5, 50, 512), "storage"),
        (Facts("nfs4", 100, None, 50, None), "storage"),
        (Facts("nfs4", 100, None, None, None), "memory"),
    ],
)
def test_a_set_is_measured_as_most_epochs_read_it(facts: Facts, situation: str) -> None:
    assert situation_of(facts)[0] == situation


def test_ways_to_try_are_those_that_the_machine_can_do() -> None:
    for situation, direct, cores in itertools.product(("memory", "storage"), (False, True), (1, 2, 6, 96)):
        ways = list(ways_of(DEFAULT, "mmap", situation, direct, cores))  # type: ignore[arg-type]
        assert len(set(ways)) == len(ways)
        ios = {way.io for way in ways}
        assert ios == ({"auto", "pread", "direct"} if direct and situation == "storage" else {"auto", "pread"})
        threads = [way.num_threads or 0 for way in ways]
        assert max(threads) <= max(64, cores)
        assert min(threads) == 1
        assert situation == "storage" or max(threads) <= cores


def test_a_way_that_could_have_the_job_killed_is_not_tried() -> None:
    way = replace(DEFAULT, prefetch=4)
    assert tuning.has_room(way, 50, None)
    assert tuning.has_room(way, 50, 350)
    assert not tuning.has_room(way, 50, 349)
    assert tuning.has_room(DEFAULT, 50, 0)


def test_the_line_to_paste_makes_the_loader_that_was_chosen(
    make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "_TRIAL_SECONDS", 0.001)
    path = make_set(60)
    result = tune(path, batch_sizes=[8], crop=(4, 4), device="cpu", seconds=0.1)
    assert result.situation == "memory"
    with eval(result.line, {"ShardLoader": ShardLoader}) as loader:
        assert loader.batch_size == 8
        assert next(iter(loader))[0].shape == (8, 3, 4, 4)


def test_a_larger_set_is_read_elsewhere_in_each_trial(
    make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_set(60)
    monkeypatch.setattr(tuning, "_TRIAL_SECONDS", 0.001)
    made: list[dict[str, Any]] = []
    real = ShardLoader.__init__

    def note(self: ShardLoader, *words: Any, **options: Any) -> None:
        made.append(options)
        real(self, *words, **options)

    monkeypatch.setattr(ShardLoader, "__init__", note)
    trial = tuning.Trial(open_shards(path), "train", "storage")
    for number in range(3):
        assert trial.measure(replace(DEFAULT, batch_size=8), number) > 0
    assert [options["seed"] for options in made] == [0, 1, 2]
    assert not any("indices" in options for options in made)


def test_ctrl_c_ends_the_trials_and_keeps_what_they_told(
    make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "_TRIAL_SECONDS", 0.001)
    path, turns = make_set(60), itertools.count(1)
    count = len(list(ways_of(DEFAULT, "mmap", "memory", False, tuning.usable_cores())))

    def interrupt(way: Combination) -> None:
        if next(turns) == count + 2:
            raise KeyboardInterrupt

    result = tune(path, batch_sizes=[8], device="cpu", seconds=100, on_turn=interrupt)
    assert sum(map(len, result.rates.values())) == count + 2
    turns = itertools.count(count)
    with pytest.raises(KeyboardInterrupt):
        tune(path, batch_sizes=[8], device="cpu", seconds=100, on_turn=interrupt)


def test_the_command_prints_a_table_and_the_line(
    make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "_TRIAL_SECONDS", 0.001)
    words = ["tune", str(make_set(60)), "--batch-size", "8,4", "--device", "cpu", "--seconds", "0.1"]
    text = CliRunner().invoke(cli, words, catch_exceptions=False).stdout
    assert "batch  threads  prefetch  io" in text
    assert "\n  ShardLoader('" in text
    told = json.loads(CliRunner().invoke(cli, [*words, "--json"], catch_exceptions=False).stdout)
    assert {way["batch_size"] for way in told["ways"]} == {8, 4}
    assert told["ways"][0]["batch_size"] == 8
    assert told["line"].startswith("ShardLoader(")
