"""Stopping anywhere and going on, with other ranks and batch sizes: exactly the samples not yet consumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio.loader import ShardLoader
from shardio.sampler import Sampler

EPOCH = 2


def global_batches(sampler: Sampler) -> list[list[int]]:
    """What all ranks together read at each step."""
    ranks = [replace(sampler, rank=rank).batches(EPOCH) for rank in range(sampler.world_size)]
    return [np.concatenate(parts).tolist() for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_small_epoch_goes_on_from_every_step_with_every_other_split(shuffle: bool) -> None:
    splits = list(product((1, 2, 3), (1, 2, 3)))
    for num_samples in range(1, 13):
        whole = global_batches(Sampler(num_samples, 1, shuffle=shuffle, tail="short"))
        order = [index for batch in whole for index in batch]
        for (world_size, batch_size), (next_world, next_batch) in product(splits, splits):
            first = Sampler(num_samples, batch_size, 0, world_size, shuffle=shuffle, tail="short")
            second = Sampler(num_samples, next_batch, 0, next_world, shuffle=shuffle, tail="short")
            steps = global_batches(first)
            for stop in range(len(steps) + 1):
                read = [index for batch in steps[:stop] for index in batch]
                rest = global_batches(replace(second, start=len(read)))
                case = (num_samples, world_size, batch_size, next_world, next_batch, stop)
                assert read + [index for batch in rest for index in batch] == order, case


def test_a_rest_that_fills_no_batch_is_dropped_or_padded_as_the_tail_says() -> None:
    rest = Sampler(10, 4, start=3)
    assert rest.num_batches == 1
    assert replace(rest, tail="short").num_batches == 2
    padded = global_batches(replace(rest, tail="pad"))
    whole = [i for batch in global_batches(Sampler(10, 1)) for i in batch]
    assert padded == [whole[3:7], [*whole[7:], whole[0]]]


@pytest.mark.parametrize("start", [-1, 11])
def test_a_start_outside_of_the_epoch_is_refused(start: int) -> None:
    with pytest.raises(ValueError, match=f"start must be from 0 to 10; found {start}"):
        Sampler(10, 2, start=start)


@pytest.fixture
def loader_of(make_set: Callable[..., Path]) -> Iterator[Callable[..., ShardLoader]]:
    opened: list[ShardLoader] = []

    def make(batch_size: int, num_samples: int = 61, **options: Any) -> ShardLoader:
        options = {"tail": "short", "device": "cpu", "num_threads": 1, "return_indices": True, **options}
        opened.append(ShardLoader(make_set(num_samples), batch_size, **options))
        return opened[-1]

    yield make
    for loader in opened:
        loader.close()


def indices_of(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch[2].tolist()]


@pytest.mark.parametrize("seed", range(20))
def test_a_job_that_changes_its_size_again_and_again_reads_each_sample_once(
    seed: int, loader_of: Callable[..., ShardLoader]
) -> None:
    rng = np.random.default_rng(seed)
    expected = indices_of(loader_of(61, seed=seed))
    state = json.dumps(loader_of(61, seed=seed).state_dict())
    read: list[int] = []
    while len(read) < 61:
        world_size, batch_size = int(rng.integers(1, 6)), int(rng.integers(1, 6))
        ranks = [loader_of(batch_size, seed=seed, rank=r, world_size=world_size) for r in range(world_size)]
        for loader in ranks:
            loader.load_state_dict(json.loads(state))
        iterators = [iter(loader) for loader in ranks]
        for _ in range(min(int(rng.integers(1, 6)), len(iterators[0]))):
            for iterator in iterators:
                read += next(iterator)[2].tolist()
        states = {json.dumps(loader.state_dict()) for loader in ranks}
        assert len(states) == 1, f"seed {seed}: the ranks are not at the same place: {states}"
        state = states.pop()
    assert read == expected, f"seed {seed}"


def test_the_state_says_what_was_received_and_not_what_was_read_ahead(loader_of: Callable[..., ShardLoader]) -> None:
    loader = loader_of(4, prefetch=6)
    places = [(loader.state_dict()["epoch"], loader.state_dict()["consumed"])]
    for _ in loader:
        places.append((loader.state_dict()["epoch"], loader.state_dict()["consumed"]))
    places.append((loader.state_dict()["epoch"], loader.state_dict()["consumed"]))
    assert places == [*((0, min(4 * step, 61)) for step in range(17)), (1, 0)]


def test_a_resumed_job_goes_on_batch_by_batch_as_if_nothing_had_happened(
    loader_of: Callable[..., ShardLoader],
) -> None:
    undisturbed = loader_of(8, tail="drop")
    expected = [batch[2].tolist() for _ in range(3) for batch in undisturbed]
    for stop in range(len(expected)):
        first = loader_of(8, tail="drop")
        batches = (batch for _ in range(3) for batch in first)
        seen = [next(batches)[2].tolist() for _ in range(stop)]
        second = loader_of(8, tail="drop")
        second.load_state_dict(first.state_dict())
        batches = (batch for _ in range(3) for batch in second)
        seen += [next(batches)[2].tolist() for _ in range(len(expected) - stop)]
        assert seen == expected, stop


def test_an_epoch_that_was_read_to_its_end_is_followed_by_the_next(loader_of: Callable[..., ShardLoader]) -> None:
    first = loader_of(8, tail="drop")
    list(first)
    second = loader_of(5)  # could still give the five samples that the tail has dropped, but the epoch is over
    second.load_state_dict(first.state_dict())
    assert iter(second).epoch == 1


def test_setting_the_epoch_that_was_loaded_keeps_the_place_and_any_other_begins_anew(
    loader_of: Callable[..., ShardLoader],
) -> None:
    first = loader_of(8)
    first.set_epoch(3)
    next(iter(first))
    state = first.state_dict()
    second = loader_of(8)
    second.load_state_dict(state)
    second.set_epoch(3)
    assert len(indices_of(second)) == 61 - 8
    second.load_state_dict(state)
    second.set_epoch(4)
    assert len(indices_of(second)) == 61


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", 1), ("shuffle", False), ("split", "val"), ("digest", "0" * 64), ("order_version", 0)],
)
def test_a_state_of_another_order_is_refused(name: str, value: Any, loader_of: Callable[..., ShardLoader]) -> None:
    loader = loader_of(8)
    state = {**loader.state_dict(), name: value}
    with pytest.raises(ValueError, match=f"expected a state whose {name} is .* found {value!r}"):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    "change", [{"consumed": 62}, {"consumed": -1}, {"epoch": -1}, {"epoch": 1 << 64}, {"epoch": "3"}]
)
def test_a_state_outside_of_the_epoch_is_refused(change: dict[str, Any], loader_of: Callable[..., ShardLoader]) -> None:
    loader = loader_of(8)
    with pytest.raises(ValueError, match=f"{next(iter(change.values()))}"):
        loader.load_state_dict({**loader.state_dict(), **change})


def test_a_state_with_other_keys_is_refused(loader_of: Callable[..., ShardLoader]) -> None:
    loader = loader_of(8)
    for state in ({}, {**loader.state_dict(), "more": 1}):
        with pytest.raises(ValueError, match="expected a state with"):
            loader.load_state_dict(state)
    assert len(indices_of(loader)) == 61
