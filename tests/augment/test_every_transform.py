"""What every transform promises: the same pixels for a sample wherever it is, from pictures that are only read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import as_batch
from transforms import ALL, FIXED, RANDOM, SINGLE

import shardio.augment
from shardio import ShardLoader
from shardio.augment import (
    ColorJitter,
    Compose,
    HorizontalFlip,
    Normalize,
    PerSample,
    RandAugment,
    RandomErasing,
    RandomInvert,
)
from shardio.augment.batch import Batch
from shardio.augment.boxes import Draws
from shardio.augment.chain import Transform

COUNT = 12


def pictures(count: int = COUNT, height: int = 18, width: int = 17) -> torch.Tensor:
    rng = np.random.default_rng(5)
    return as_batch(rng.integers(20, 230, (count, height, width, 3), np.uint8))


IMAGES = pictures()
INDICES = np.random.default_rng(1).permutation(1000)[:COUNT]


def name_of(transform: object) -> str:
    return type(transform).__name__


def changed(transform: Transform, images: torch.Tensor, **options: Any) -> torch.Tensor:
    result = transform(images, **{"seed": 0, "indices": range(len(images)), **options})
    assert isinstance(result, torch.Tensor)
    return result


each = pytest.mark.parametrize("transform", SINGLE, ids=name_of)
each_random = pytest.mark.parametrize("transform", RANDOM, ids=name_of)


def test_every_class_is_here() -> None:
    public = {
        value for value in vars(shardio.augment).values() if isinstance(value, type) and issubclass(value, Transform)
    }
    assert public - {Transform, PerSample} == {kind for transform in ALL for kind in kinds_of(transform)}


def kinds_of(transform: Transform) -> set[type]:
    inner = getattr(transform, "transforms", ())
    return {type(transform)}.union(*(kinds_of(part) for part in inner))


@each
def test_a_sample_is_changed_alike_in_any_batch(transform: Transform) -> None:
    whole = changed(transform, IMAGES, indices=INDICES, seed=3, epoch=5)
    assert len(whole) == COUNT
    for some in (slice(0, 1), slice(3, 10), [11, 2, 2, 7]):
        part = changed(transform, IMAGES[some], indices=INDICES[some], seed=3, epoch=5)
        assert torch.equal(part, whole[some])
        assert part.dtype == whole.dtype


@each
def test_threads_change_nothing(transform: Transform) -> None:
    expected = changed(transform, IMAGES)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(changed(transform, IMAGES), expected)
    finally:
        torch.set_num_threads(before)


@each_random
def test_another_seed_epoch_view_sample_or_place_in_a_chain_is_another_change(transform: Transform) -> None:
    images = IMAGES[:1].expand(40, -1, -1, -1)
    one = changed(transform, images)
    for other in ({"seed": 1}, {"epoch": 1}, {"view": 1}, {"indices": np.arange(40) + 40}):
        two = changed(transform, images, **other)
        assert not (one == two).flatten(1).all(dim=1).all()
    batch = Batch(images, Draws(0, 0, np.arange(40)), np.tile([18, 17], (40, 1)))
    named, elsewhere = (transform.apply(batch, purpose).finished().images for purpose in (name_of(transform), "x"))
    assert torch.equal(named, one)
    assert not torch.equal(elsewhere, one)
    again = changed(transform, images, indices=np.arange(1, 40 + 1))
    assert torch.equal(again[:-1], one[1:])


@each_random
def test_calls_without_samples_draw_afresh_from_torchs_generator(transform: Transform) -> None:
    images = IMAGES[:1].expand(40, -1, -1, -1)
    torch.manual_seed(1)
    one, two = transform(images), transform(images)
    assert not torch.equal(one, two)
    torch.manual_seed(1)
    assert torch.equal(transform(images), one)


@pytest.mark.parametrize("transform", FIXED, ids=name_of)
def test_what_draws_nothing_leaves_torchs_generator_alone(transform: Transform) -> None:
    before = torch.get_rng_state()
    transform(IMAGES)
    assert torch.equal(torch.get_rng_state(), before)


@each
def test_what_comes_last_changes_no_draw_before_it(transform: Transform) -> None:
    alone = changed(Compose([transform]), IMAGES)
    if alone.dtype == torch.uint8:
        assert torch.equal(changed(Compose([transform, RandomInvert(1.0)]), IMAGES), 255 - alone)
    first = changed(HorizontalFlip(), IMAGES, seed=2)
    chain = Compose([HorizontalFlip(), transform])
    draws = Draws(2, 0, np.arange(COUNT))
    flipped = HorizontalFlip().apply(Batch(IMAGES, draws, np.tile([18, 17], (COUNT, 1))), "Compose/HorizontalFlip 0")
    number = int(isinstance(transform, HorizontalFlip))
    rest = transform.apply(flipped.finished(), f"Compose/{name_of(transform)} {number}").finished().images
    difference = (changed(chain, IMAGES, seed=2).float() - rest.float()).abs().max()
    assert difference <= (1 if alone.dtype == torch.uint8 else 0.05)  # a flip may be one pass with what follows
    assert not torch.equal(first, IMAGES)


@each
@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_are_only_read_in_whatever_way_they_lie(transform: Transform, channels: int) -> None:
    images = IMAGES[:8, :channels].contiguous()
    expected = changed(transform, images)
    wide = torch.zeros(8, channels, 18, 34, dtype=torch.uint8)
    wide[..., ::2] = images
    for lying in (
        images.contiguous(memory_format=torch.channels_last),
        wide[..., ::2],
        torch.cat([images, images])[::2].new_empty(16, channels, 18, 17).copy_(images.repeat_interleave(2, 0))[::2],
        images.flip(2).flip(2),
    ):
        before = lying.clone()
        found = changed(transform, lying)
        assert torch.equal(found, expected)
        assert torch.equal(lying, before)
        if found is not lying:
            found.zero_()
            assert torch.equal(lying, before)
    one = images[:1].expand(5, -1, -1, -1)
    assert changed(transform, one).shape[0] == 5
    assert torch.equal(one, images[:1].expand(5, -1, -1, -1))


@each
def test_noting_what_is_wanted_changes_nothing(transform: Transform) -> None:
    before = IMAGES.clone()
    batch = transform.apply(Batch(IMAGES, Draws(0, 0, np.arange(COUNT)), np.tile([18, 17], (COUNT, 1))), "x")
    one, two = batch.finished().images, batch.finished().images
    assert torch.equal(one, two)
    assert torch.equal(IMAGES, before)


@each
def test_empty_batches_and_batches_of_one(transform: Transform) -> None:
    whole = changed(transform, IMAGES)
    empty = changed(transform, IMAGES[:0])
    assert empty.shape == (0, *whole.shape[1:])
    assert empty.dtype == whole.dtype
    assert torch.equal(changed(transform, IMAGES[:1]), whole[:1])


@each
def test_squashed_pictures_have_the_true_size(transform: Transform) -> None:
    """What looks at places treats pictures as if they had never been squashed; what looks at colors need not."""
    sizes = np.tile([24, 30], (COUNT, 1))
    found = changed(transform, IMAGES, sizes=sizes)
    true = changed(transform, IMAGES.repeat_interleave(2, 2)[:, :, :24].repeat_interleave(2, 3)[..., :30])
    assert found.shape in {true.shape, IMAGES.shape}
    assert torch.equal(changed(transform, IMAGES[3:5], sizes=sizes[3:5], indices=[3, 4]), found[3:5])


def test_a_loader_gives_the_same_pixels_after_a_resume_on_other_ranks_in_other_batches(
    make_set: Callable[..., Path],
) -> None:
    chain = Compose(
        [
            RandAugment(),
            ColorJitter(0.4, 0.4, 0.4, 0.1),
            Normalize(),
            RandomErasing(0.8, value="random", count=(1, 2)),
        ]
    )
    options: dict[str, Any] = {
        "device": "cpu", "transform": chain, "return_indices": True, "seed": 4, "tail": "short", "num_threads": 1,
    }  # fmt: skip
    path = make_set(30, (16, 16, 3))

    def read(loader: ShardLoader, batches: int | None = None) -> dict[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for number, (images, _, indices) in enumerate(loader, start=1):
            found.update(zip(indices.tolist(), images.clone(), strict=True))
            if number == batches:
                break
        return found

    with ShardLoader(path, 7, **options) as loader:
        expected = read(loader)
    with ShardLoader(path, 4, rank=0, world_size=1, **options) as loader:
        found = read(loader, 3)
        state = loader.state_dict()
    for rank in range(3):
        with ShardLoader(path, 5, rank=rank, world_size=3, **options) as loader:
            loader.load_state_dict(state)
            found.update(read(loader))
    assert found.keys() == expected.keys()
    assert len(found) == 30
    assert all(torch.equal(found[index], expected[index]) for index in found)
