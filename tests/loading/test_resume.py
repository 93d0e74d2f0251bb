"""Stopping anywhere and going on, with other ranks and batch sizes: exactly the samples not yet consumed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from check_order import check_resumed_jobs

from shardio.augment import RandomResizedCrop
from shardio.errors import FormatError
from shardio.loading.loader import ShardLoader
from shardio.order.orders import BlockShuffle, Endless, GlobalShuffle, Order, WeightedDraws, make_order
from shardio.order.sampler import Sampler

EPOCH = 2


def global_batches(sampler: Sampler) -> list[list[int]]:
    """Returns the samples that all ranks together read at each step."""
    ranks = [replace(sampler, rank=rank).batches(EPOCH) for rank in range(sampler.world_size)]
    return [np.concatenate(parts).tolist() for parts in zip(*ranks, strict=True)]


SOURCES: dict[str, Callable[[int], Order]] = {
    "global": lambda n: make_order(n),
    "stored": lambda n: make_order(n, shuffle=False),
    "block": lambda n: make_order(n, shuffle=BlockShuffle(2, 2)),
    "subset": lambda n: make_order(20, indices=range(3, 3 + n)),
    "weighted": lambda n: WeightedDraws(np.arange(7), 0, n),
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_small_epoch_goes_on_from_every_step_with_every_other_split(name: str) -> None:
    splits = list(product((1, 2, 3), (1, 2, 3)))
    for num_samples in range(1, 13):
        source = SOURCES[name](num_samples)
        whole = global_batches(Sampler(source, 1, tail="short"))
        order = [index for batch in whole for index in batch]
        samplers = {split: Sampler(source, split[1], 0, split[0], tail="short") for split in splits}
        rests = {
            (split, start): global_batches(replace(samplers[split], start=start))
            for split in splits
            for start in range(num_samples + 1)
        }
        for split, next_split in product(splits, splits):
            steps = rests[split, 0]
            for stop in range(len(steps) + 1):
                read = [index for batch in steps[:stop] for index in batch]
                rest = rests[next_split, len(read)]
                case = (num_samples, split, next_split, stop)
                assert read + [index for batch in rest for index in batch] == order, case


def test_a_rest_that_fills_no_batch_is_dropped_or_padded_as_the_tail_says() -> None:
    rest = Sampler(GlobalShuffle(10, 0), 4, start=3)
    assert rest.num_batches == 1
    assert replace(rest, tail="short").num_batches == 2
    padded = global_batches(replace(rest, tail="pad"))
    whole = [i for batch in global_batches(Sampler(GlobalShuffle(10, 0), 1)) for i in batch]
    assert padded == [whole[3:7], [*whole[7:], whole[0]]]


@pytest.fixture
def loader_of(make_set: Callable[..., Path]) -> Iterator[Callable[..., ShardLoader]]:
    opened: list[ShardLoader] = []

    def make(batch_size: int, **options: Any) -> ShardLoader:
        options = {"tail": "short", "device": "cpu", "num_threads": 1, "return_indices": True, **options}
        opened.append(ShardLoader(make_set(61), batch_size, **options))
        return opened[-1]

    yield make
    for loader in opened:
        loader.close()


def indices_of(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch[2].tolist()]


def test_jobs_that_change_their_size_again_and_again_read_each_sample_once() -> None:
    assert list(check_resumed_jobs(5, seed=0)) == list(range(1, 6))


def test_a_sample_read_twice_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    state_dict = ShardLoader.state_dict

    def too_few(loader: ShardLoader) -> dict[str, Any]:
        state = state_dict(loader)
        return {**state, "consumed": max(0, state["consumed"] - 1)}

    monkeypatch.setattr(ShardLoader, "state_dict", too_few)
    with pytest.raises(AssertionError, match="seed=1 "):
        list(check_resumed_jobs(1, seed=0))


def test_the_state_says_what_was_received_and_not_what_was_read_ahead(loader_of: Callable[..., ShardLoader]) -> None:
    loader = loader_of(4, prefetch=6)
    places = [(loader.state_dict()["epoch"], loader.state_dict()["consumed"])]
    for _ in loader:
        places.append((loader.state_dict()["epoch"], loader.state_dict()["consumed"]))
    places.append((loader.state_dict()["epoch"], loader.state_dict()["consumed"]))
    assert places == [*((0, min(4 * step, 61)) for step in range(17)), (1, 0)]


def test_an_epoch_that_was_read_to_its_end_is_followed_by_the_next(loader_of: Callable[..., ShardLoader]) -> None:
    first = loader_of(8, tail="drop")
    list(first)
    second = loader_of(5)  # could still give the five samples that the tail has dropped, but the epoch is over
    second.load_state_dict(first.state_dict())
    assert iter(second).epoch == 1


@pytest.mark.parametrize("tail", ["drop", "pad", "short"])
@pytest.mark.parametrize("options", [{}, {"shuffle": BlockShuffle(4)}, {"weights": np.arange(61)}])
def test_every_loop_over_epochs_goes_on_exactly_from_every_batch(
    tail: str, options: dict[str, Any], loader_of: Callable[..., ShardLoader]
) -> None:
    """An epoch's last batch is no exception: the rest of its pass gives nothing, and the next epoch follows."""
    whole = loader_of(8, tail=tail, **options)
    expected = [(epoch, batch[2].tolist()) for epoch in range(2) for batch in whole]
    for stop in range(1, len(expected) + 1):
        first = loader_of(8, tail=tail, **options)
        batches = (batch for _ in range(2) for batch in first)
        for _ in range(stop):
            next(batches)
        state, epoch_there = first.state_dict(), expected[stop - 1][0]
        by_set_epoch, by_itself, by_state = ([], [], [])

        loader = loader_of(8, tail=tail, **options)
        loader.load_state_dict(state)
        for epoch in range(epoch_there, 2):
            loader.set_epoch(epoch)
            by_set_epoch += [(epoch, batch[2].tolist()) for batch in loader]

        loader.load_state_dict(state)
        for epoch in range(epoch_there, 2):
            by_itself += [(epoch, batch[2].tolist()) for batch in loader]

        loader.load_state_dict(state)
        while loader.state_dict()["epoch"] < 2:
            by_state += [(loader.state_dict()["epoch"], batch[2].tolist()) for batch in loader]

        assert by_set_epoch == by_itself == by_state == expected[stop:], stop


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
    with pytest.raises(ValueError, match=f"belongs to (other data|another order): its {name} is {value!r}, th"):
        loader.load_state_dict(state)


def test_a_pinned_loader_refuses_another_set_and_so_does_a_state(
    make_set: Callable[..., Path], loader_of: Callable[..., ShardLoader]
) -> None:
    loader = loader_of(8)
    state, digest = loader.state_dict(), loader.shards.digest
    assert state["digest"] == digest
    other = make_set(61, samples_per_shard=7)  # the same samples, but stored otherwise
    message = f"digest: expected {digest[:12]}, found "
    with pytest.raises(FormatError, match=message):
        ShardLoader(other, 8, device="cpu", digest=digest[:12])
    with ShardLoader(loader.shards.path, 8, device="cpu", digest=digest) as pinned:
        pinned.load_state_dict(state)
    with ShardLoader(other, 8, device="cpu") as another, pytest.raises(ValueError, match="belongs to other data"):
        another.load_state_dict(state)


@pytest.mark.parametrize(
    "change", [{"consumed": 62}, {"consumed": -1}, {"epoch": -1}, {"epoch": 1 << 64}, {"epoch": "3"}]
)
def test_a_state_outside_of_the_epoch_is_refused(change: dict[str, Any], loader_of: Callable[..., ShardLoader]) -> None:
    loader = loader_of(8)
    with pytest.raises(ValueError, match=f"{next(iter(change.values()))}"):
        loader.load_state_dict({**loader.state_dict(), **change})


def test_a_state_with_other_keys_is_refused(loader_of: Callable[..., ShardLoader]) -> None:
    loader = loader_of(8)
    for state in ({}, {"loader": loader.state_dict()}):
        with pytest.raises(ValueError, match="this is not the state of a ShardLoader: it lacks digest, split, "):
            loader.load_state_dict(state)
    for more in (1, None):
        with pytest.raises(ValueError, match=f"its more is {more}, this loader's is None"):
            loader.load_state_dict({**loader.state_dict(), "more": more})
    assert len(indices_of(loader)) == 61


@pytest.mark.parametrize("value", [np.arange(2), torch.arange(2), np.array(0), [torch.arange(2)], "x" * 10**6, None])
def test_a_state_with_any_other_value_in_a_field_is_refused_in_few_words(
    value: Any, loader_of: Callable[..., ShardLoader]
) -> None:
    loader = loader_of(8)
    for name in loader.state_dict():
        with pytest.raises(ValueError, match=name) as caught:
            loader.load_state_dict({**loader.state_dict(), name: value})
        assert len(str(caught.value)) < 1000


def test_a_state_is_json_also_where_numpys_integers_were_given(loader_of: Callable[..., ShardLoader]) -> None:
    numbers = {"seed": np.int64(3), "rank": np.int32(0), "world_size": np.uint8(1)}
    for options in (
        {"shuffle": np.True_},
        {"shuffle": BlockShuffle(np.int16(4), np.int64(2))},
        {"weights": np.ones(61), "epoch_batches": np.int64(9), "tail": "drop", "repeats": np.int8(2)},
    ):
        loader = loader_of(np.int64(4), **numbers, **options)
        loader.set_epoch(np.int64(5))
        next(iter(loader))
        state = json.loads(json.dumps(loader.state_dict()))
        assert (state["epoch"], state["consumed"], state["seed"]) == (5, 4 + 5 * 4 * options.get("epoch_batches", 0), 3)
        loader_of(4, **numbers, **options).load_state_dict(state)


ORDERS: dict[str, dict[str, Any]] = {
    "global": {},
    "stored": {"shuffle": False},
    "block": {"shuffle": BlockShuffle(4, 3)},
    "other block": {"shuffle": BlockShuffle(4, 4)},
    "weighted": {"weights": np.arange(61)},
    "other weights": {"weights": np.arange(61)[::-1]},
    "subset": {"indices": range(5, 50)},
    "other subset": {"indices": range(4, 49)},
    "block of a subset": {"shuffle": BlockShuffle(4, 3), "indices": range(5, 50)},
    "weighted subset": {"weights": np.arange(1, 46), "indices": range(5, 50)},
}


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_is_resumed_exactly_and_by_itself_only(name: str, loader_of: Callable[..., ShardLoader]) -> None:
    whole = indices_of(loader_of(1, **ORDERS[name]))
    first = loader_of(7, **ORDERS[name])
    iterator = iter(first)
    read = [*next(iterator)[2].tolist(), *next(iterator)[2].tolist()]
    state = json.loads(json.dumps(first.state_dict()))
    assert len(json.dumps(state)) < 500
    second = loader_of(3, **ORDERS[name])
    second.load_state_dict(state)
    assert read + indices_of(second) == whole
    for other in ORDERS.keys() - {name}:
        with pytest.raises(ValueError, match="the state belongs to another order: its "):
            loader_of(3, **ORDERS[other]).load_state_dict(state)


# --- endless streams --------------------------------------------------------------------------------------------------


def test_epochs_of_a_stream_have_exactly_so_many_batches_and_go_on_where_the_last_ended(
    loader_of: Callable[..., ShardLoader],
) -> None:
    stream = Endless(make_order(61, seed=5))(0, np.arange(1000)).tolist()
    loader = loader_of(8, epoch_batches=5, seed=5, tail="drop")
    for epoch in range(4):
        assert len(loader) == 5
        assert indices_of(loader) == stream[epoch * 40 : (epoch + 1) * 40]
    loader.set_epoch(9)
    assert indices_of(loader) == stream[360:400]
    iterator = iter(loader)
    next(iterator)  # of epoch 10; what is left of it is left out
    assert indices_of(loader) == stream[440:480]


def test_a_stream_is_resumed_with_other_ranks_and_batch_sizes(loader_of: Callable[..., ShardLoader]) -> None:
    stream = Endless(make_order(61, seed=5))(0, np.arange(1000)).tolist()
    options: dict[str, Any] = {"seed": 5, "tail": "drop"}
    first = loader_of(8, epoch_batches=5, **options)
    list(first)
    iterator = iter(first)
    for _ in range(2):
        next(iterator)
    state = json.loads(json.dumps(first.state_dict()))
    assert (state["epoch"], state["consumed"], state["batch"]) == (1, 56, 2)
    for epoch_batches, left in ((5, 3), (4, 2), (2, 0), (1, 0)):
        ranks = [loader_of(3, epoch_batches=epoch_batches, rank=rank, world_size=2, **options) for rank in range(2)]
        found: list[int] = []
        for epoch in (1, 2):
            for loader in ranks:
                if epoch == 1:
                    loader.load_state_dict(state)
                loader.set_epoch(epoch)
            for parts in zip(*ranks, strict=True):
                found += indices_of(parts)
        assert found == stream[56 : 56 + 6 * (left + epoch_batches)]
        assert ranks[0].state_dict() == ranks[1].state_dict()


def test_a_stream_and_repeats_draw_each_sample_anew_wherever_it_comes_again(make_set: Callable[..., Path]) -> None:
    out = make_set(4, (32, 32, 3))
    options: dict[str, Any] = {"epoch_batches": 3, "repeats": 2, "transform": RandomResizedCrop(8), "device": "cpu"}
    with ShardLoader(out, 8, **options) as loader, ShardLoader(out, 8, return_indices=True, **options) as other:
        other.load_state_dict({**loader.state_dict(), "consumed": 8, "batch": 1})
        batches = list(loader)
        pictures = [picture.numpy().tobytes() for images, _ in batches for picture in images]
        assert len(set(pictures)) == 24
        for (expected, _), (found, _, indices) in zip(batches[1:], other, strict=True):
            assert torch.equal(expected, found)
            assert sorted(Counter(indices.tolist()).values()) == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({}, {"endless": True}),
        ({"epoch_batches": 3}, {"batch": -1}),
        ({"epoch_batches": 3}, {"batch": 1.0}),
        ({"epoch_batches": 3}, {"consumed": 2**62}),
        ({"epoch_batches": 3, "repeats": 2}, {"consumed": 3}),
        ({"epoch_batches": 3}, {"repeats": 2}),
    ],
)
def test_states_of_other_streams_are_refused(
    options: dict[str, Any], changed: dict[str, Any], loader_of: Callable[..., ShardLoader]
) -> None:
    loader = loader_of(4, **{"tail": "drop", **options})
    with pytest.raises(ValueError, match=r"state|2\*\*62"):
        loader.load_state_dict({**loader.state_dict(), **changed})
    with pytest.raises(ValueError, match=r"fewer than 2\*\*62|epoch must be from 0"):
        loader.set_epoch(2**62 if options else 2**64)
