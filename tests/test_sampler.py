"""Every rank's batches, for every way of splitting an epoch."""

from __future__ import annotations

import tracemalloc
from itertools import product
from typing import get_args

import numpy as np
import pytest

import shardio.sampler
from shardio.permutation import Permutation
from shardio.sampler import Sampler, Tail

TAILS: tuple[Tail, ...] = get_args(Tail)
EPOCH = 3


def epoch_order(num_samples: int, seed: int, shuffle: bool) -> np.ndarray:
    positions = np.arange(num_samples)
    return Permutation(num_samples, seed, EPOCH)(positions) if shuffle else positions


def all_batches(sampler: Sampler, first_step: int = 0) -> list[np.ndarray]:
    return list(sampler.batches(EPOCH, first_step))


def check_epoch(num_samples: int, batch_size: int, world_size: int, tail: Tail, shuffle: bool, seed: int) -> None:
    """All that is promised of one epoch, over all ranks."""
    case = f"{num_samples=} {batch_size=} {world_size=} {tail=} {shuffle=} {seed=}"
    samplers = [
        Sampler(num_samples, batch_size, rank, world_size, seed=seed, shuffle=shuffle, tail=tail)
        for rank in range(world_size)
    ]
    ranks = [all_batches(sampler) for sampler in samplers]
    global_size = batch_size * world_size
    full, rest = divmod(num_samples, global_size)
    num_steps = full + (rest > 0 and tail != "drop")
    assert {sampler.global_batch_size for sampler in samplers} == {global_size}, case
    assert {sampler.num_batches for sampler in samplers} == {num_steps}, case
    assert {len(batches) for batches in ranks} == {num_steps}, case

    order = epoch_order(num_samples, seed, shuffle)
    if tail == "pad":
        order = np.resize(order, num_steps * global_size)  # from its beginning again
    elif tail == "drop":
        order = order[: num_steps * global_size]
    whole = all_batches(Sampler(num_samples, global_size, seed=seed, shuffle=shuffle, tail=tail))
    assert len(whole) == num_steps, case
    for step in range(num_steps):
        parts = [batches[step] for batches in ranks]
        together = np.concatenate(parts)
        assert together.dtype == np.int64, case
        assert np.array_equal(together, order[step * global_size : (step + 1) * global_size]), (case, step)
        assert np.array_equal(together, whole[step]), (case, step)
        sizes = {len(part) for part in parts}
        if step < full or tail == "pad":
            assert sizes == {batch_size}, (case, step)
        else:
            assert max(sizes) - min(sizes) <= 1, (case, step)
            assert max(sizes) <= batch_size, (case, step)

    seen = np.concatenate([batch for batches in ranks for batch in batches]) if num_steps else np.array([], np.int64)
    counts = np.bincount(seen, minlength=num_samples)
    assert len(counts) == num_samples, case
    if tail == "drop":
        assert counts.max() <= 1, case
        assert num_samples - counts.sum() == rest, case
    elif tail == "short":
        assert set(counts) == {1}, case
    else:
        assert counts.min() >= 1, case
        assert counts.max() - counts.min() <= 1, case  # nobody is favoured by more than one turn


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("tail", TAILS)
def test_ranks_partition_every_small_epoch(tail: Tail, shuffle: bool) -> None:
    for num_samples, world_size, batch_size in product(range(1, 25), range(1, 6), range(1, 6)):
        check_epoch(num_samples, batch_size, world_size, tail, shuffle, seed=num_samples)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("tail", TAILS)
def test_ranks_partition_large_epochs(tail: Tail, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_samples = int(rng.integers(1, 100_000))
    check_epoch(num_samples, int(rng.integers(1, 700)), int(rng.integers(1, 40)), tail, bool(seed % 4), seed)


@pytest.mark.parametrize("batch_size", [1, 3, 1000, 1 << 15, (1 << 15) + 1])
@pytest.mark.parametrize("tail", TAILS)
def test_chunks_of_work_do_not_show_in_the_batches(tail: Tail, batch_size: int) -> None:
    num_samples = 2 * shardio.sampler._CHUNK + 5001
    sampler = Sampler(num_samples, batch_size, 1, 2, seed=9, tail=tail)
    batches = all_batches(sampler)
    order = epoch_order(num_samples, 9, shuffle=True)
    assert len(batches) == sampler.num_batches
    for step, batch in enumerate(batches):
        start, stop = sampler.bounds(step)
        assert np.array_equal(batch, np.take(order, range(start, stop), mode="wrap")), step


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("tail", TAILS)
def test_first_step_continues_every_small_epoch_exactly(tail: Tail, shuffle: bool) -> None:
    for num_samples, world_size, batch_size in product((1, 2, 7, 12, 24), (1, 2, 3), (1, 2, 5)):
        sampler = Sampler(num_samples, batch_size, world_size - 1, world_size, shuffle=shuffle, tail=tail)
        batches = [batch.tolist() for batch in all_batches(sampler)]
        for first_step in range(len(batches) + 3):
            rest = [batch.tolist() for batch in all_batches(sampler, first_step)]
            assert rest == batches[first_step:], (num_samples, world_size, batch_size, first_step)


@pytest.mark.parametrize("seed", range(5))
def test_first_step_continues_large_epochs_exactly(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sampler = Sampler(int(rng.integers(70_000, 200_000)), int(rng.integers(1, 300)), seed=seed, tail="short")
    batches = all_batches(sampler)
    for first_step in rng.integers(0, len(batches), 5).tolist():
        rest = all_batches(sampler, first_step)
        assert len(rest) == len(batches) - first_step, (seed, first_step)
        assert np.array_equal(np.concatenate(rest), np.concatenate(batches[first_step:])), (seed, first_step)


def test_splitting_the_same_global_batch_differently_keeps_every_step() -> None:
    for tail in TAILS:
        steps = []
        for world_size in (1, 2, 3, 4, 6, 8, 12, 24):
            ranks = [
                all_batches(Sampler(1001, 24 // world_size, rank, world_size, tail=tail)) for rank in range(world_size)
            ]
            steps.append([sorted(np.concatenate(parts).tolist()) for parts in zip(*ranks, strict=True)])
        assert all(other == steps[0] for other in steps), tail


def test_epochs_and_seeds_have_their_own_orders() -> None:
    orders = {
        tuple(np.concatenate(list(Sampler(100, 10, seed=seed).batches(epoch))).tolist())
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_without_shuffling_all_epochs_are_in_source_order() -> None:
    for epoch in (0, 1, 99):
        batches = Sampler(10, 3, shuffle=False, tail="short").batches(epoch)
        assert [batch.tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_more_ranks_than_samples_get_empty_batches_with_short_and_repeats_with_pad() -> None:
    short = [all_batches(Sampler(2, 1, rank, 5, tail="short", shuffle=False)) for rank in range(5)]
    assert [[batch.tolist() for batch in batches] for batches in short] == [[[]], [[]], [[0]], [[]], [[1]]]
    pad = [all_batches(Sampler(2, 1, rank, 5, tail="pad", shuffle=False)) for rank in range(5)]
    assert [[batch.tolist() for batch in batches] for batches in pad] == [[[0]], [[1]], [[0]], [[1]], [[0]]]


def test_a_step_of_ten_thousand_million_samples_costs_no_memory() -> None:
    sampler = Sampler(10**10, 256, 3, 64)
    tracemalloc.start()
    try:
        batch = next(sampler.batches(EPOCH, first_step=sampler.num_batches - 1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    start, stop = sampler.bounds(sampler.num_batches - 1)
    assert np.array_equal(batch, Permutation(10**10, 0, EPOCH)(np.arange(start, stop)))
    assert peak < 8 << 20


def test_steps_outside_of_the_epoch_are_refused() -> None:
    sampler = Sampler(10, 3)
    for step in (-1, 3, 100):
        with pytest.raises(IndexError, match=f"step must be from 0 to 2; found {step}$"):
            sampler.bounds(step)
    with pytest.raises(IndexError, match=r"step must be from 0 to 2; found -1$"):
        next(sampler.batches(0, first_step=-1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0}, "num_samples and batch_size must be at least 1; found 0, 4$"),
        ({"num_samples": -5}, "num_samples and batch_size must be at least 1; found -5, 4$"),
        ({"batch_size": 0}, "num_samples and batch_size must be at least 1; found 10, 0$"),
        ({"batch_size": -1}, "num_samples and batch_size must be at least 1; found 10, -1$"),
        ({"rank": 1}, "rank must be from 0 to world_size - 1; found 1 of 1$"),
        ({"rank": -1, "world_size": 4}, "rank must be from 0 to world_size - 1; found -1 of 4$"),
        ({"world_size": 0}, "rank must be from 0 to world_size - 1; found 0 of 0$"),
        ({"tail": "keep"}, "tail must be one of drop, pad, short; found 'keep'$"),
        ({"tail": None}, "tail must be one of drop, pad, short; found None$"),
        ({"seed": -1}, r"seed must be from 0 to 2\*\*64 - 1; found -1$"),
        ({"seed": 2**64}, rf"seed must be from 0 to 2\*\*64 - 1; found {2**64}$"),
    ],
)
def test_impossible_samplers_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(**{"num_samples": 10, "batch_size": 4, **arguments})  # type: ignore[arg-type]


def test_a_negative_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"found seed 0, epoch -1$"):
        next(Sampler(10, 4).batches(-1))
