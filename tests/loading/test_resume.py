"""Stopping anywhere and going on, with other ranks and batch sizes: exactly the samples not yet consumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from check_order import check_resumed_jobs

from shardio.loading.loader import ShardLoader
from shardio.order.orders import BlockShuffle


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


def test_a_state_is_json_where_numpys_integers_were_given(make_set: Callable[..., Path], closing: ExitStack) -> None:
    numbers = {"seed": np.int64(3), "rank": np.int32(0), "world_size": np.uint8(1)}
    path, options = make_set(61), dict[str, Any]()
    for options in (
        {"shuffle": np.True_},
        {"shuffle": BlockShuffle(np.int16(4), np.int64(2))},
        {"weights": np.ones(61), "epoch_batches": np.int64(9), "repeats": np.int8(2)},
    ):
        options = {"device": "cpu", **numbers, **options}
        loader, other = (closing.enter_context(ShardLoader(path, np.int64(4), **options)) for _ in range(2))
        loader.set_epoch(np.int64(5))
        next(iter(loader))
        state = json.loads(json.dumps(loader.state_dict()))
        assert (state["epoch"], state["consumed"], state["seed"]) == (5, 4 + 5 * 4 * options.get("epoch_batches", 0), 3)
        other.load_state_dict(state)


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
