"""Endless orders and repeated samples, compared with plain integers."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from plain_arithmetic import plain_permute, plain_round_keys

from shardio.order.orders import BlockShuffle, Endless, make_order
from shardio.order.sampler import Sampler

LARGE = 10**10


def plain_stream(n: int, seed: int, positions: list[int]) -> list[int]:
    return [plain_permute(p % n, n, plain_round_keys(seed, p // n)) for p in positions]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 10, LARGE])
def test_an_endless_order_is_one_permutation_after_the_other(n: int) -> None:
    positions = [*range(6 * min(n, 10) + 1), LARGE - 1, LARGE, 7 * LARGE + 3, 2**62 - 1]
    order = Endless(make_order(n, seed=7))
    assert order(0, np.array(positions)).tolist() == plain_stream(n, 7, positions)
    assert order(5, np.array(positions[::-1])).tolist() == plain_stream(n, 7, positions)[::-1]  # of no epoch
    with pytest.raises(ValueError, match="positions must be from 0"):
        order(0, np.array([2**62]))


@pytest.mark.parametrize("options", [{"shuffle": False}, {"shuffle": BlockShuffle(3, 2)}, {"weights": np.arange(11)}])
def test_any_order_can_be_endless(options: dict[str, object]) -> None:
    order = make_order(11, seed=3, **options)  # type: ignore[arg-type]
    passes = [order(number, np.arange(11)) for number in range(4)]
    assert Endless(order)(0, np.arange(44)).tolist() == np.concatenate(passes).tolist()
    assert Endless(order).describe() == {**order.describe(), "endless": True}


def test_batches_of_an_endless_order_go_on_across_epochs_ranks_and_batch_sizes() -> None:
    order = Endless(make_order(7, seed=1))
    expected = order(0, np.arange(200)).tolist()
    for (world_size, batch_size, length), start in product(product((1, 2, 3), (1, 2, 5), (1, 3)), (0, 5, 40)):
        ranks = [Sampler(order, batch_size, r, world_size, start=start, length=length) for r in range(world_size)]
        assert {sampler.num_batches for sampler in ranks} == {length}
        steps = zip(*(sampler.batches(0) for sampler in ranks), strict=True)
        found = [index for parts in steps for part in parts for index in part.tolist()]
        assert found == expected[start : start + length * batch_size * world_size]


# --- repeats ----------------------------------------------------------------------------------------------------------


def steps_of(n: int, batch_size: int, world_size: int, repeats: int, start: int = 0) -> list[list[list[int]]]:
    """Returns the samples of each step and rank."""
    order = make_order(n, seed=2)
    ranks = [Sampler(order, batch_size, r, world_size, start=start, repeats=repeats) for r in range(world_size)]
    return [[part.tolist() for part in parts] for parts in zip(*(r.batches(3) for r in ranks), strict=True)]


def test_each_sample_comes_so_often_in_its_global_batch_and_on_different_ranks_where_it_can() -> None:
    n = 40
    order = make_order(n, seed=2)(3, np.arange(n)).tolist()
    for batch_size, world_size, repeats in product((1, 2, 3, 4, 6), (1, 2, 3, 4, 6), (1, 2, 3, 4)):
        size = batch_size * world_size
        if size % repeats:
            continue
        steps = steps_of(n, batch_size, world_size, repeats)
        assert len(steps) == n // size  # as many as without repeats
        for step, parts in enumerate(steps):
            counts = Counter(index for part in parts for index in part)
            assert set(counts.values()) == {repeats}
            assert sorted(counts) == sorted(order[step * size // repeats : (step + 1) * size // repeats])
            if world_size >= repeats:
                assert all(len(set(part)) == len(part) for part in parts)


def test_repeats_do_not_depend_on_the_number_of_ranks_and_go_on_after_any_batch() -> None:
    whole = steps_of(60, 12, 1, 3)
    for world_size in (2, 3, 4, 6, 12):
        split = steps_of(60, 12 // world_size, world_size, 3)
        assert [[sum(parts, [])] for parts in split] == whole  # noqa: RUF017
    assert steps_of(60, 6, 2, 3, start=24) == steps_of(60, 6, 2, 3)[2:]


@pytest.mark.parametrize(
    ("options", "found"), [({"repeats": 3}, r"found 4 \* 2"), ({"repeats": 4, "start": 2}, "found 2")]
)
def test_repeats_that_do_not_divide_a_batch_are_refused(options: dict[str, int], found: str) -> None:
    with pytest.raises(ValueError, match=f"multiple of repeats=.*{found}"):
        Sampler(make_order(20), 4, 0, 2, **options)  # type: ignore[arg-type]
