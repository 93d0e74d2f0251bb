"""Every rank's batches, for every way of splitting an epoch or an endless order; and repeated samples."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import chain, product

import numpy as np
import pytest
from check_order import EPOCH, ORDERS, TAILS, check_epoch
from plain_arithmetic import plain_permute, plain_round_keys

import shardio.order.sampler
from shardio.order.orders import BlockShuffle, Endless, GlobalShuffle, StoredOrder, make_order
from shardio.order.permutation import Permutation
from shardio.order.sampler import Sampler, Tail


def all_batches(sampler: Sampler) -> list[np.ndarray]:
    return list(sampler.batches(EPOCH))


@pytest.mark.parametrize("name", ORDERS)
def test_ranks_partition_every_small_epoch(name: str) -> None:
    for num_samples in (1, 2, 5, 8, 12):
        order = ORDERS[name](num_samples, num_samples)
        for world_size, batch_size, tail in product(range(1, 5), range(1, 5), TAILS):
            check_epoch(order, batch_size, world_size, tail)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", ORDERS)
def test_ranks_partition_large_epochs(name: str, tail: Tail) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        order = ORDERS[name](int(rng.integers(1, 100_000)), seed)
        check_epoch(order, int(rng.integers(1, 700)), int(rng.integers(1, 40)), tail)


@pytest.mark.parametrize("shift", [1, -1])
def test_a_rank_that_reads_beside_its_part_would_be_noticed(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = Sampler.bounds

    def shifted(sampler: Sampler, step: int) -> tuple[int, int]:
        start, stop = bounds(sampler, step)
        return (start + shift, stop + shift) if sampler.rank == 1 else (start, stop)

    monkeypatch.setattr(Sampler, "bounds", shifted)
    with pytest.raises(AssertionError, match="world_size=2"):
        check_epoch(GlobalShuffle(20, 0), 4, 2, "drop")


@pytest.mark.parametrize("batch_size", [7, 1000, 1 << 15, (1 << 15) + 1])
@pytest.mark.parametrize("tail", TAILS)
def test_chunks_of_work_do_not_show_in_the_batches(tail: Tail, batch_size: int) -> None:
    num_samples = 2 * shardio.order.sampler._CHUNK + 5001
    source = GlobalShuffle(num_samples, seed=9)
    sampler = Sampler(source, batch_size, 1, 2, tail)
    batches = all_batches(sampler)
    order = source(EPOCH, np.arange(num_samples))
    assert len(batches) == sampler.num_batches
    for step, batch in enumerate(batches):
        start, stop = sampler.bounds(step)
        assert np.array_equal(batch, np.take(order, range(start, stop), mode="wrap")), step


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("tail", TAILS)
def test_every_small_epoch_goes_on_from_any_step_exactly(tail: Tail, name: str) -> None:
    for num_samples, world_size, batch_size in product((1, 7, 24), (1, 2, 3), (1, 2, 5)):
        sampler = Sampler(ORDERS[name](num_samples, 0), batch_size, world_size - 1, world_size, tail)
        batches = [batch.tolist() for batch in all_batches(sampler)]
        for step in range(num_samples // sampler.global_batch_size + 1):
            rest = all_batches(replace(sampler, start=step * sampler.global_batch_size))
            assert [batch.tolist() for batch in rest] == batches[step:], (num_samples, world_size, batch_size, step)


def global_batches(sampler: Sampler) -> list[list[int]]:
    """Returns the samples that all ranks together read at each step."""
    ranks = [all_batches(replace(sampler, rank=rank)) for rank in range(sampler.world_size)]
    return [np.concatenate(parts).tolist() for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("name", ORDERS)
def test_every_small_epoch_goes_on_from_every_step_with_every_other_split(name: str) -> None:
    splits = list(product((1, 2, 3), (1, 2, 3)))
    for num_samples in (1, 2, 7, 12):
        source = ORDERS[name](num_samples, 0)
        order = source(EPOCH, np.arange(num_samples)).tolist()
        rests = {
            (split, start): global_batches(Sampler(source, split[1], 0, split[0], "short", start))
            for split in splits
            for start in range(num_samples + 1)
        }
        for split, next_split in product(splits, splits):
            steps = rests[split, 0]
            for stop in range(len(steps) + 1):
                read = list(chain(*steps[:stop]))
                case = (num_samples, split, next_split, stop)
                assert [*read, *chain(*rests[next_split, len(read)])] == order, case


def test_a_rest_that_fills_no_batch_is_dropped_or_padded_as_the_tail_says() -> None:
    rest = Sampler(GlobalShuffle(10, 0), 4, start=3)
    assert rest.num_batches == 1
    assert replace(rest, tail="short").num_batches == 2
    whole = GlobalShuffle(10, 0)(EPOCH, np.arange(10)).tolist()
    assert global_batches(replace(rest, tail="pad")) == [whole[3:7], [*whole[7:], whole[0]]]


def test_more_ranks_than_samples_get_empty_batches_with_short_and_repeats_with_pad() -> None:
    short = [all_batches(Sampler(StoredOrder(2), 1, rank, 5, "short")) for rank in range(5)]
    assert [[batch.tolist() for batch in batches] for batches in short] == [[[]], [[]], [[0]], [[]], [[1]]]
    pad = [all_batches(Sampler(StoredOrder(2), 1, rank, 5, "pad")) for rank in range(5)]
    assert [[batch.tolist() for batch in batches] for batches in pad] == [[[0]], [[1]], [[0]], [[1]], [[0]]]


def test_a_step_of_ten_thousand_million_samples_costs_no_memory() -> None:
    sampler = Sampler(GlobalShuffle(10**10, 0), 256, 3, 64)
    tracemalloc.start()
    try:
        last = replace(sampler, start=(sampler.num_batches - 1) * sampler.global_batch_size)
        batch = next(last.batches(EPOCH))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    start, stop = sampler.bounds(sampler.num_batches - 1)
    assert np.array_equal(batch, Permutation(10**10, 0, EPOCH)(np.arange(start, stop)))
    assert peak < 8 << 20


def test_steps_outside_of_the_epoch_are_refused() -> None:
    sampler = Sampler(StoredOrder(10), 3)
    for step in (-1, 3, 100):
        with pytest.raises(IndexError, match=f"step must be from 0 to 2; found {step}$"):
            sampler.bounds(step)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1; found 0$"),
        ({"batch_size": -1}, "batch_size must be at least 1; found -1$"),
        ({"rank": 1}, "rank must be from 0 to world_size - 1; found 1 of 1$"),
        ({"rank": -1, "world_size": 4}, "rank must be from 0 to world_size - 1; found -1 of 4$"),
        ({"world_size": 0}, "rank must be from 0 to world_size - 1; found 0 of 0$"),
        ({"start": -1}, "start"),
        ({"start": 11}, "start"),
        ({"tail": "keep"}, "tail must be one of drop, pad, short; found 'keep'$"),
        ({"tail": None}, "tail must be one of drop, pad, short; found None$"),
    ],
)
def test_impossible_samplers_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(**{"order": StoredOrder(10), "batch_size": 4, **arguments})  # type: ignore[arg-type]


# --- endless orders ---------------------------------------------------------------------------------------------------


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
