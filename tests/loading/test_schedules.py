"""Loaders whose batch size, transform and shares change at batches and epochs that are known beforehand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from check_order import check_mixtures

from shardio import Part, Schedule, ShardLoader
from shardio.augment import Compose, HorizontalFlip, RandomResizedCrop
from shardio.order.mixture import MixedOrder
from shardio.order.orders import Endless, make_order

SMALL, LARGE = (Compose([RandomResizedCrop(side), HorizontalFlip()]) for side in (8, 16))
SIZES = {0: 8, 3: 4, 7: 6}

Open = Callable[..., ShardLoader]


@pytest.fixture
def loader_of(make_set: Callable[..., Path]) -> Iterator[Open]:
    opened: list[ShardLoader] = []
    out = make_set(61, (24, 24, 3))

    def make(batch_size: Any, **options: Any) -> ShardLoader:
        options = {"device": "cpu", "num_threads": 2, "return_indices": True, "seed": 5, **options}
        opened.append(ShardLoader(options.pop("sets", out), batch_size, **options))
        return opened[-1]

    yield make
    for loader in opened:
        loader.close()


def test_batch_sizes_change_at_their_batches_and_no_sample_is_lost(loader_of: Open) -> None:
    stream = Endless(make_order(61, seed=5))(0, np.arange(200)).tolist()
    loader = loader_of(SIZES, epoch_batches=4)
    sizes, read = [], []
    for _ in range(3):
        assert len(loader) == 4
        for _, _, indices in loader:
            sizes.append(len(indices))
            read += indices.tolist()
            assert loader.batch_size == dict(enumerate([8] * 3 + [4] * 4 + [6] * 20)).get(len(sizes))
    assert sizes == [8, 8, 8, 4, 4, 4, 4, 6, 6, 6, 6, 6]
    assert read == stream[: sum(sizes)]
    loader.set_epoch(1)
    assert next(iter(loader))[2].tolist() == stream[28:32]


def test_a_job_goes_on_exactly_across_a_change_with_other_ranks(loader_of: Open) -> None:
    stream = Endless(make_order(61, seed=5))(0, np.arange(400)).tolist()
    schedule = {"transform": {0: SMALL, 6: LARGE}, "epoch_batches": 4}
    whole = list(loader_of(SIZES, **schedule))
    first = loader_of(SIZES, **schedule)
    iterator = iter(first)
    next(iterator), next(iterator)
    state = json.loads(json.dumps(first.state_dict()))
    rest = loader_of(SIZES, **schedule)
    rest.load_state_dict(state)
    for (images, _, indices), (found, _, numbers) in zip(whole[2:], rest, strict=True):
        assert indices.tolist() == numbers.tolist()
        assert torch.equal(images, found)
    # Two ranks of the same batch size read twice as many, and change at the same batches.
    ranks = [loader_of(SIZES, rank=rank, world_size=2, **schedule) for rank in range(2)]
    read, shapes = [], []
    for epoch in range(3):
        for loader in ranks:
            if not epoch:
                loader.load_state_dict(state)
        for parts in zip(*ranks, strict=True):
            read += [index for _, _, indices in parts for index in indices.tolist()]
            shapes.append((len(parts[0][0]), parts[0][0].shape[-1]))
    assert read == stream[16 : 16 + len(read)]
    assert shapes == [(8, 8), (4, 8), (4, 8), (4, 8), (4, 16), *[(6, 16)] * 5]
    assert ranks[0].state_dict() == ranks[1].state_dict()


@pytest.mark.parametrize("options", [{"num_threads": 2}, {"roi": False}, {"prefetch": 0, "io": "pread"}])
def test_pixels_are_those_of_the_transform_of_their_batch(options: dict[str, Any], loader_of: Open) -> None:
    transforms = {0: SMALL, 2: None, 3: LARGE}
    loader = loader_of(8, transform=transforms, epoch_batches=5, **options)
    alone = {start: loader_of(8, transform=one, epoch_batches=5, **options) for start, one in transforms.items()}
    expected = {start: list(one) for start, one in alone.items()}
    for step, batch in enumerate(loader):
        start = max(start for start in transforms if start <= step)
        assert all(map(torch.equal, batch, expected[start][step]))
    assert loader.transform is LARGE
    loader.transform = None
    assert next(iter(loader))[0].dtype == torch.uint8


def test_without_a_stream_values_change_by_epoch(loader_of: Open) -> None:
    loader = loader_of(
        Schedule({0: 10, 1: 6}, by="epoch"), transform=Schedule({0: SMALL, 2: LARGE}, by="epoch"), tail="short"
    )
    for epoch, (size, side) in enumerate([(10, 8), (6, 8), (6, 16)]):
        assert len(loader) == -(-61 // size)
        batches = list(loader)
        assert {images.shape[2] for images, *_ in batches} == {side}
        assert [len(images) for images, *_ in batches] == [*[size] * (61 // size), 61 % size]
        order = make_order(61, seed=5)(epoch, np.arange(61)).tolist()
        assert [index for batch in batches for index in batch[2].tolist()] == order
    for name, value in (("batch_size", {0: 8, 1: 4}), ("transform", {0: None, 3: SMALL})):
        with pytest.raises(ValueError, match=f"{name}: a schedule by batch needs epoch_batches="):
            loader_of(**{"batch_size": 8, name: value})


def test_shares_change_at_their_batches_on_any_number_of_ranks(tmp_path: Path, loader_of: Open) -> None:
    from plain_sets import make_plain_set

    paths = []
    for name, count in (("one", 40), ("other", 41)):
        (tmp_path / name).mkdir()
        paths.append(make_plain_set(tmp_path / name, count, (24, 24, 3)))
    shares = {str(paths[0]): {0: 1, 5: 0}, str(paths[1]): Schedule({0: 1, 1: 3}, by="epoch")}
    options = {"epoch_batches": 3, "sets": shares}
    loader = loader_of(8, **options)
    counts = [int(more["source"].sum()) for _ in range(3) for *_, more in loader]
    assert counts == [4, 4, 4, 6, 6, 8, 8, 8, 8]
    whole = [indices.tolist() for _ in range(3) for _, _, indices, _ in (loader.set_epoch(_), *loader)[1:]]
    for world_size, stop in ((1, 4), (2, 2), (4, 7)):
        first = [loader_of(8 // world_size, rank=r, world_size=world_size, **options) for r in range(world_size)]
        read: list[list[int]] = []
        epoch = 0
        while len(read) < stop:
            for parts in zip(*first, strict=True):
                read.append([index for _, _, indices, _ in parts for index in indices.tolist()])
                if len(read) == stop:
                    break
            epoch += 1
        state = json.loads(json.dumps(first[0].state_dict()))
        rest = loader_of(8, **options)
        rest.load_state_dict(state)
        while len(read) < 9:
            read += [indices.tolist() for _, _, indices, _ in rest]
        assert read == whole
    # Repeats: the shares are those of the samples drawn.
    twice = loader_of(8, repeats=2, **options)
    assert [int(more["source"].sum()) for _ in range(3) for *_, more in twice] == counts
    state = twice.state_dict()
    again = loader_of(8, repeats=2, **options)
    again.load_state_dict(state)
    assert [batch[2].tolist() for batch in again] == [batch[2].tolist() for batch in twice]


def test_a_share_that_is_no_schedule_is_refused(tmp_path: Path, loader_of: Open) -> None:
    with pytest.raises(ValueError, match="0 among them"):
        loader_of(8, epoch_batches=3, sets=[Part(tmp_path, {1: 2})])
    with pytest.raises(ValueError, match="not all 0"):
        loader_of(8, epoch_batches=3, sets=[Part(tmp_path, {0: 1, 3: 0})])


def test_mixtures_that_are_killed_and_changed_lose_and_repeat_no_sample() -> None:
    assert list(check_mixtures(25, seed=0)) == list(range(1, 26))


@pytest.mark.parametrize("careless", ["before", "since"])
def test_a_mixture_that_goes_on_elsewhere_would_be_noticed(careless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    describe_at = MixedOrder.describe_at

    def wrong(order: MixedOrder, position: int) -> dict[str, Any]:
        told = describe_at(order, position)
        if careless == "since":
            return {**told, "since": max(0, told["since"] - 1)}
        return {**told, "sets": [{**one, "before": one["before"] + 1} for one in told["sets"]]}

    monkeypatch.setattr(MixedOrder, "describe_at", wrong)
    with pytest.raises(AssertionError, match="seed="):
        list(check_mixtures(25, seed=0))
