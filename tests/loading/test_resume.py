"""Stopping anywhere and going on, with other ranks and batch sizes: exactly the samples not yet consumed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from check_order import check_resumed_jobs

from shardio.augment import RandomResizedCrop
from shardio.errors import FormatError
from shardio.loading.loader import ShardLoader
from shardio.order.orders import BlockShuffle, Endless, make_order


@pytest.fixture
def loader_of(make_set: Callable[..., Path], closing: ExitStack) -> Callable[..., ShardLoader]:
    def make(batch_size: int, **options: Any) -> ShardLoader:
        options = {"tail": "short", "device": "cpu", "num_threads": 1, "return_indices": True, **options}
        return closing.enter_context(ShardLoader(make_set(61), batch_size, **options))

    return make


def indices_of(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch[2].tolist()]


@pytest.mark.filterwarnings("ignore:.*empty on rank:RuntimeWarning")
def test_jobs_that_change_their_size_again_and_again_read_each_sample_once() -> None:
    assert list(check_resumed_jobs(2, seed=0)) == [1, 2]


@pytest.mark.filterwarnings("ignore:.*empty on rank:RuntimeWarning")
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


@pytest.mark.parametrize(
    ("tail", "options"), [("drop", {}), ("pad", {"shuffle": BlockShuffle(4)}), ("short", {"weights": np.arange(61)})]
)
def test_every_loop_over_epochs_goes_on_exactly_from_every_batch(
    tail: str, options: dict[str, Any], loader_of: Callable[..., ShardLoader]
) -> None:
    """An epoch's last batch is no exception: the rest of its pass gives nothing, and the next epoch follows."""
    loader, states = loader_of(8, tail=tail, **options), []
    expected = []
    for epoch in range(2):
        for batch in loader:
            expected.append((epoch, batch[2].tolist()))
            states.append(loader.state_dict())
    for stop, state in enumerate(states, 1):
        epoch_there = expected[stop - 1][0]
        by_set_epoch, by_itself, by_state = ([], [], [])

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


@pytest.mark.parametrize("stored", [lambda value: np.array(value)[()], np.array, torch.tensor])
@pytest.mark.parametrize("mixture", [False, True])
def test_numbers_of_a_state_may_come_back_as_scalars_arrays_or_tensors(
    stored: Callable[[Any], Any], mixture: bool, make_set: Callable[..., Path], closing: ExitStack
) -> None:
    def as_stored(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: as_stored(one) for name, one in value.items()}
        if isinstance(value, list):
            return tuple(as_stored(one) for one in value)
        return stored(value) if isinstance(value, int) else value

    options: dict[str, Any] = {"epoch_batches": 4, "device": "cpu", "return_indices": True}
    sets: Any = {make_set(61): 2, make_set(9): 1} if mixture else make_set(61)
    first, second = (closing.enter_context(ShardLoader(sets, 8, shuffle="block", **options)) for _ in range(2))
    iterator = iter(first)
    next(iterator)
    second.load_state_dict(as_stored(first.state_dict()))
    assert second.state_dict() == first.state_dict()
    assert indices_of(second) == indices_of(iterator)


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
