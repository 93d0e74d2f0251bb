"""check-shuffle's statistics: their theory holds, true randomness passes, and bad shuffles do not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import chain, permutations
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import shardio.measure.shuffle as shufflecheck
import shardio.order.permutation
from shardio.cli.main import cli
from shardio.measure.shuffle import check_shuffle, is_sampled
from shardio.order.orders import BlockShuffle, GlobalShuffle, StoredOrder, make_order


class Numpy:
    """True random permutations."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seed = seed

    def __call__(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)[positions]

    def describe(self) -> dict[str, Any]:
        return {}


class Made:
    """An order that is made of a function of (positions, epoch, num_samples)."""

    def __init__(self, num_samples: int, function: Callable[[np.ndarray, int, int], np.ndarray]) -> None:
        self.num_samples = num_samples
        self.function = function

    def __call__(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return self.function(positions, epoch, self.num_samples)

    def describe(self) -> dict[str, Any]:
        return {}


def worst(order: Any, **options: Any) -> float:
    return max(abs(statistic.z) for statistic in check_shuffle(order, **options))


def z_of(order: Any, name: str) -> float:
    """Computes no more statistics than it takes to come to the one whose name begins so."""
    n = order.num_samples
    whole = shufflecheck._of_sampled_positions if is_sampled(n) else shufflecheck._of_whole_orders
    statistics = chain(whole(order), shufflecheck._of_batches(order, 256, 1000))
    return next(abs(s.z) for s in statistics if s.name.startswith(name))


@pytest.mark.parametrize(
    "test", [shufflecheck._serial_products, shufflecheck._displacements, shufflecheck._parity_changes]
)
@pytest.mark.parametrize("n", [5, 6, 7])
def test_moments_are_those_over_all_permutations(test: Callable[[np.ndarray], Any], n: int) -> None:
    sums = [test(np.array(order)) for order in permutations(range(n))]
    found = np.array([s.found for s in sums])
    assert math.isclose(found.mean(), sums[0].mean, rel_tol=1e-9)
    assert math.isclose(found.var(), sums[0].variance, rel_tol=1e-9)


@pytest.mark.parametrize("n", [1, 2, 5, 6, 7])
def test_cycles_are_counted_and_expected_exactly(n: int) -> None:
    sums = [shufflecheck._cycles(np.array(order)) for order in permutations(range(n))]
    found = np.array([s.found for s in sums])
    assert sums[0].found == n  # the identity
    assert math.isclose(found.mean(), sums[0].mean, rel_tol=1e-9)
    assert math.isclose(found.var(), sums[0].variance, abs_tol=1e-9)


@pytest.mark.parametrize("n", [1_000, 50_000])
@pytest.mark.parametrize("seed", range(3))
def test_true_random_permutations_pass(n: int, seed: int) -> None:
    assert worst(Numpy(n, seed)) < 4.5, f"{n=} {seed=}"


@pytest.mark.parametrize("n", [1_000, 50_000, 1_281_167, 10**9])
def test_the_global_shuffle_is_as_good_as_true_randomness(n: int) -> None:
    assert worst(GlobalShuffle(n, 0)) < 4


def test_statistics_are_calibrated() -> None:
    zs = np.array([[s.z for s in check_shuffle(Numpy(1024, seed), batch_size=64)] for seed in range(1, 9)])
    assert (np.abs(zs.mean(axis=0)) < 4 / math.sqrt(len(zs))).all(), zs.mean(axis=0)
    assert 0.6 < zs.std() < 1.4


BAD: dict[str, tuple[Callable[[np.ndarray, int, int], np.ndarray], str]] = {
    "affine": (lambda p, e, n: (p * 617 + e) % n, "serial"),
    "rotated": (lambda p, e, n: (p + e * 7919) % n, "serial"),
    "shuffled within blocks of 100 only": (
        lambda p, e, n: p // 100 * 100 + np.random.default_rng(e).permutation(100)[p % 100],
        "displacement",
    ),
    "low bits kept": (lambda p, e, n: np.random.default_rng(e).permutation(n // 16)[p // 16] * 16 + p % 16, "low bits"),
    "parity kept": (lambda p, e, n: np.random.default_rng(e).permutation(n // 2)[p // 2] * 2 + p % 2, "parity"),
    "involution": (lambda p, e, n: _involution(e, n)[p], "cycles"),
}


def _involution(epoch: int, n: int) -> np.ndarray:
    pairs = np.random.default_rng(epoch).permutation(n).reshape(-1, 2)
    order = np.empty(n, np.int64)
    order[pairs[:, 0]], order[pairs[:, 1]] = pairs[:, 1], pairs[:, 0]
    return order


@pytest.mark.parametrize("name", BAD)
def test_bad_shuffles_are_caught(name: str) -> None:
    function, statistic = BAD[name]
    assert z_of(Made(48_000, function), statistic) > 6


@pytest.mark.parametrize("rounds", [1, 2])
def test_too_few_rounds_of_the_network_are_caught(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    encrypt = shardio.order.permutation._encrypt

    def weak(numbers: np.ndarray, n: int, keys: Any) -> np.ndarray:
        monkeypatch.setattr(shardio.order.permutation, "ROUNDS", rounds)
        return encrypt(numbers, n, keys)

    monkeypatch.setattr(shardio.order.permutation, "_encrypt", weak)
    assert worst(Made(50_000, lambda p, e, n: shardio.order.permutation.permute(p, n, keys_of(e)))) > 6


def keys_of(epoch: int) -> tuple[np.uint64, ...]:
    return tuple(np.random.default_rng(epoch).integers(0, 1 << 64, 6, dtype=np.uint64))


@pytest.mark.parametrize(
    ("function", "statistic"),
    [
        (lambda p, e, n: (p + 12345) % n, "serial"),
        (lambda p, e, n: p // 1000 * 1000 + (p * 617) % 1000, "displacement"),
        (lambda p, e, n: n - 1 - p, "cycles"),
        (lambda p, e, n: p ^ 1, "cycles"),
        (lambda p, e, n: p // 16 * 16 + (p * 7) % 16, "low bits"),
        (lambda p, e, n: p, "class"),
    ],
)
def test_bad_shuffles_of_many_samples_are_caught(function: Any, statistic: str) -> None:
    order = Made(10**8, function)
    assert is_sampled(10**8)
    assert z_of(order, statistic) > 6


def test_the_class_variance_shows_what_a_block_size_costs() -> None:
    def ratio(block_size: int, window_blocks: int) -> float:
        *_, variance = shufflecheck._of_batches(BlockShuffle(50_000, 0, block_size, window_blocks), 256, 1000)
        return variance.found

    costs = [ratio(1, 8192), ratio(8, 1024), ratio(32, 256), ratio(100, 82), ratio(100, 10), ratio(50_000, 1)]
    assert costs[:-1] == sorted(costs[:-1])
    assert abs(costs[0] - 1) < 0.01
    assert costs[-2] > 10
    assert abs(costs[-1] - 1) < 0.01  # one block of everything
    assert check_shuffle(StoredOrder(100_000))[-1].found > 50


def test_too_few_samples_or_senseless_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="expected at least 100 samples, found 99"):
        check_shuffle(GlobalShuffle(99, 0))
    with pytest.raises(ValueError, match="batch size must be from 2 to 50, half of the samples; found 51"):
        check_shuffle(GlobalShuffle(100, 0), batch_size=51)
    for classes in (1, 51):
        with pytest.raises(ValueError, match=f"classes must be from 2 to 50, half of the samples; found {classes}"):
            check_shuffle(GlobalShuffle(100, 0), batch_size=10, num_classes=classes)


def test_the_command_prints_a_table_and_json() -> None:
    text = CliRunner().invoke(cli, ["check-shuffle", "2000", "--block-size", "50", "--window-blocks", "2"])
    assert text.exit_code == 0, text.output
    assert "blocks of 50 samples, windows of 2 blocks\nglobal: good, every |z| is below 4" in text.output
    assert text.output.count("\n") == 10
    assert max(map(len, text.output.splitlines())) <= 80
    result = CliRunner().invoke(cli, ["check-shuffle", "2000", "--json", "--seed", "3", "--batch-size", "100"])
    found = json.loads(result.output)
    assert found["ok"] is True
    assert found["seed"] == 3
    order = make_order(2000, seed=3)
    assert [s["z"] for s in found["global"]] == [s.z for s in check_shuffle(order, batch_size=100)]
    assert {s["name"] for s in found["global"]} == {s["name"] for s in found["block"]}


def test_the_command_fails_on_a_bad_shuffle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GlobalShuffle, "__call__", lambda self, epoch, positions: positions)
    result = CliRunner().invoke(cli, ["check-shuffle", "2000"])
    assert result.exit_code == 1
    assert "BAD" in result.output
