"""What every transform promises: the same pixels for a sample wherever it is, from pictures that are only read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from pictures import as_batch
from transforms import ALL, FIXED, RANDOM, SINGLE, changed, name_of

import shardio.augment
from shardio.augment import (
    CenterCrop,
    Compose,
    HorizontalFlip,
    Pad,
    PerSample,
    RandomCrop,
    RandomErasing,
    RandomInvert,
    RandomResizedCrop,
    Resize,
)
from shardio.augment.batch import Batch
from shardio.augment.boxes import Draws
from shardio.augment.chain import Transform

COUNT = 12
MOVING = {CenterCrop, Pad, RandomCrop, RandomResizedCrop, Resize}
IMAGES = as_batch(np.random.default_rng(5).integers(20, 230, (COUNT, 18, 17, 3), np.uint8))
INDICES = np.random.default_rng(1).permutation(1000)[:COUNT]


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
def test_a_sample_and_its_mask_are_changed_alike_in_any_batch_and_thread(
    transform: Transform, monkeypatch: pytest.MonkeyPatch
) -> None:
    def part(some: Any) -> tuple[torch.Tensor, torch.Tensor]:
        options: dict[str, Any] = {"seed": 3, "epoch": 5, "indices": INDICES[some]}
        pixels, arrays = transform(IMAGES[some], masks={"m": IMAGES[some].permute(0, 2, 3, 1)}, **options)
        assert torch.equal(pixels, changed(transform, IMAGES[some], **options))  # type: ignore[arg-type]
        return pixels, arrays["m"]  # type: ignore[return-value]

    whole = part(slice(None))
    assert len(whole[0]) == COUNT
    assert whole[1].shape[1:3] == whole[0].shape[2:]
    somes: list[Any] = [slice(0, 1), slice(3, 10), [11, 2, 2, 7]] * 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    with ThreadPoolExecutor(3) as threads:
        for some, found in zip(somes, threads.map(part, somes), strict=True):
            for one, other in zip(found, whole, strict=True):
                assert torch.equal(one, other[some])
                assert one.dtype == other.dtype


@each_random
def test_another_seed_epoch_view_sample_or_place_in_a_chain_is_another_change(transform: Transform) -> None:
    images = IMAGES[:1].expand(40, -1, -1, -1)
    one = changed(transform, images)
    for other in ({"seed": 1}, {"epoch": 1}, {"view": 1}, {"indices": np.arange(40) + 40}):
        assert not torch.equal(changed(transform, images, **other), one)
    batch = Batch(images, Draws(0, 0, np.arange(40)), np.tile([18, 17], (40, 1)))
    named, elsewhere = (transform.apply(batch, purpose).finished().images for purpose in (name_of(transform), "x"))
    assert torch.equal(named, one)
    assert not torch.equal(elsewhere, one)
    again = changed(transform, images, indices=np.arange(1, 40 + 1))
    assert torch.equal(again[:-1], one[1:])


@each
def test_calls_without_samples_draw_afresh_from_torchs_generator_if_they_draw(transform: Transform) -> None:
    images: Any = IMAGES[:1].expand(40, -1, -1, -1)
    torch.manual_seed(1)
    before, one = torch.get_rng_state(), transform(images)
    assert torch.equal(torch.get_rng_state(), before) == (transform in FIXED)
    assert torch.equal(transform(images), one) == (transform in FIXED)
    torch.manual_seed(1)
    assert torch.equal(transform(images), one)


@each
def test_what_comes_last_changes_no_draw_before_it(transform: Transform) -> None:
    alone = changed(Compose([transform]), IMAGES)
    if alone.dtype == torch.uint8:
        assert torch.equal(changed(Compose([transform, RandomInvert(1.0)]), IMAGES), 255 - alone)
    draws = Draws(2, 0, np.arange(COUNT))
    flipped = HorizontalFlip().apply(Batch(IMAGES, draws, np.tile([18, 17], (COUNT, 1))), "Compose/HorizontalFlip 0")
    number = int(isinstance(transform, HorizontalFlip))
    rest = transform.apply(flipped.finished(), f"Compose/{name_of(transform)} {number}").finished().images
    difference = changed(Compose([HorizontalFlip(), transform]), IMAGES, seed=2).float() - rest.float()
    # A flip may be one pass with what follows.
    assert difference.abs().max() <= (1 if alone.dtype == torch.uint8 else 0.05)


@each
@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_are_only_read_in_whatever_way_they_lie(transform: Transform, channels: int) -> None:
    images = IMAGES[:8, :channels].contiguous()
    expected = changed(transform, images)
    for lying in (
        images.contiguous(memory_format=torch.channels_last),
        images.repeat_interleave(2, 3)[..., ::2],
        images.repeat_interleave(2, 0)[::2],
    ):
        found = changed(transform, lying)
        assert torch.equal(found, expected)
        assert torch.equal(lying, images)
        if found is not lying:
            found.zero_()
            assert torch.equal(lying, images)
    one = images[:1].expand(5, -1, -1, -1)
    assert changed(transform, one).shape[0] == 5
    assert torch.equal(one[4], IMAGES[0, :channels])


@each
def test_an_empty_batch_has_the_shapes_and_dtypes_of_others(transform: Transform) -> None:
    masks = {"m": IMAGES[:, 0]}
    whole, arrays = transform(IMAGES, masks=masks)
    empty, nothing = transform(IMAGES[:0], masks={"m": masks["m"][:0]})
    for none, some in ((empty, whole), (nothing["m"], arrays["m"])):
        assert none.shape == (0, *some.shape[1:])  # type: ignore[union-attr]
        assert none.dtype == some.dtype  # type: ignore[union-attr]


@each
def test_squashed_pictures_have_the_true_size(transform: Transform) -> None:
    """What looks at places treats pictures as if they had never been squashed; what looks at colors need not."""
    sizes = np.tile([24, 30], (COUNT, 1))
    found, true = changed(transform, IMAGES, sizes=sizes), changed(Resize((24, 30)), IMAGES)
    expected = [changed(transform, images) for images in (true, IMAGES)]
    assert any(found.shape == images.shape for images in expected)
    if not any(kind in MOVING or kind is RandomErasing for kind in kinds_of(transform)):
        assert any(torch.equal(found, images) for images in expected)
    assert torch.equal(changed(transform, IMAGES[3:5], sizes=sizes[3:5], indices=[3, 4]), found[3:5])
