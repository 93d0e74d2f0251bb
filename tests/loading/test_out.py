"""Batches in the caller's own tensors: the same values, always at the same place, or an error before any is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from arrays import change_split, some_arrays

from shardio.augment import Compose, Mixup, Normalize, RandomResizedCrop, Views
from shardio.loading.loader import ShardLoader
from shardio.loading.out import write_batch

NUM_SAMPLES = 23
MakeLoader = Callable[..., ShardLoader]
FLOATS = Compose([RandomResizedCrop(4), Normalize("imagenet")])


@pytest.fixture
def loader_of(make_set: Callable[..., Path]) -> MakeLoader:
    def make(**options: Any) -> ShardLoader:
        return ShardLoader(make_set(NUM_SAMPLES), 5, **{"device": "cpu", "seed": 2, **options})

    return make


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Returns all tensors of a batch, those of tuples and dicts too."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    return [tensor for part in (batch.values() if isinstance(batch, dict) else batch) for tensor in tensors_of(part)]


def empty_like(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return torch.empty_like(batch)
    if isinstance(batch, dict):
        return {name: empty_like(part) for name, part in batch.items()}
    return tuple(map(empty_like, batch))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"return_indices": True},
    {"arrays": ["mask", "boxes"], "return_indices": True, "crop": 4},
    {"transform": FLOATS},
    {"transform": FLOATS, "arrays": ["mask", "boxes"]},
    {"transform": Compose([FLOATS, Mixup(7, alpha=0.3)])},
    {"transform": Views([FLOATS, RandomResizedCrop(3)])},
    {"transform": lambda images: images.double()},
    {"tail": "pad"},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_every_batch_is_written_to_the_same_tensors_with_the_values_that_it_has_without_them(
    loader_of: MakeLoader, make_set: Callable[..., Path], options: dict[str, Any]
) -> None:
    if "arrays" in options:
        change_split(make_set(NUM_SAMPLES), some_arrays(NUM_SAMPLES, 6, 5))
    with loader_of(**options) as usual:
        expected = [empty_like(batch) for batch in usual]
        usual.set_epoch(0)
        for kept, batch in zip(expected, usual, strict=True):
            write_batch(kept, batch, is_short=False)
    out = empty_like(expected[0])
    with loader_of(**options, out=out) as loader:
        for batch, wanted in zip(loader, expected, strict=True):
            assert [id(tensor) for tensor in tensors_of(batch)] == [id(tensor) for tensor in tensors_of(out)]
            assert all(map(torch.equal, tensors_of(batch), tensors_of(wanted)))


def test_a_short_last_batch_is_views_of_the_first_rows(loader_of: MakeLoader) -> None:
    out = (torch.empty(5, 3, 6, 5, dtype=torch.uint8), torch.empty(5, dtype=torch.int64))
    with loader_of(tail="short", out=out) as loader:
        *_, last = loader
        loader.out = None
        loader.set_epoch(0)
        *_, expected = loader
    assert [len(tensor) for tensor in last] == [3, 3]
    assert [tensor.data_ptr() for tensor in last] == [tensor.data_ptr() for tensor in out]
    assert all(map(torch.equal, last, expected))


def test_out_may_be_set_between_batches_and_keeps_its_own_memory_format(loader_of: MakeLoader) -> None:
    with loader_of() as loader:
        batches = iter(loader)
        first = next(batches)
        loader.out = out = [torch.empty(5, 3, 6, 5, dtype=torch.uint8), torch.empty_like(first[1])]
        second = next(batches)
        assert second[0] is out[0]
        assert out[0].is_contiguous()
        loader.out = None
        assert next(batches)[0] is not out[0]
        loader.set_epoch(0)
        assert torch.equal(list(loader)[1][0], second[0])


def test_a_tensor_whose_gradient_is_wanted_can_be_written_to(loader_of: MakeLoader) -> None:
    out = (torch.empty(5, 3, 6, 5, requires_grad=True), torch.empty(5, dtype=torch.int64))
    with loader_of(transform=lambda images: images.float(), out=out) as loader:
        images, _ = next(iter(loader))
        images.sum().backward()
    assert images.grad is not None


IMAGES, LABELS = torch.zeros(5, 3, 6, 5, dtype=torch.uint8), torch.zeros(5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ((IMAGES,), r"out: expected 2 parts \(a tensor of uint8 \(5, 3, 6, 5\) on cpu, .*; found 1 parts"),
        ((IMAGES, LABELS, LABELS), "out: expected 2 parts .*; found 3 parts"),
        ((IMAGES[:4], LABELS), r"out\[0\]: expected .*uint8 \(5, 3, 6, 5\) .*; found .*uint8 \(4, 3, 6, 5\) on cpu"),
        ((torch.zeros(6, 3, 6, 5, dtype=torch.uint8), LABELS), r"out\[0\]: .*; found .*\(6, 3, 6, 5\)"),
        ((IMAGES.float(), LABELS), r"out\[0\]: expected a tensor of uint8 .*; found a tensor of float32"),
        ((IMAGES, LABELS.int()), r"out\[1\]: expected a tensor of int64 .*; found a tensor of int32"),
        ((IMAGES, LABELS.to("meta")), r"out\[1\]: expected .* on cpu, .*; found .* on meta"),
        ((IMAGES, {"labels": LABELS}), r"out\[1\]: expected a tensor .*; found a dict of labels"),
        ((IMAGES, None), r"out\[1\]: expected a tensor .*; found None"),
    ],
)
def test_what_a_batch_does_not_fit_into_is_an_error_and_nothing_is_written(
    loader_of: MakeLoader, out: Any, message: str
) -> None:
    with loader_of(out=out) as loader:
        with pytest.raises(ValueError, match=message):
            next(iter(loader))
        assert loader.state_dict()["consumed"] == 0  # the batch is read again
        loader.load_state_dict(loader.state_dict())
        loader.out = None
        assert not IMAGES.any()
        assert next(iter(loader))[0].any()


def test_a_dict_needs_the_names_of_the_batch() -> None:
    batch = (IMAGES, LABELS, {"mask": LABELS})
    with pytest.raises(ValueError, match=r"out\[2\]: expected a dict of mask, .*; found a dict of boxes"):
        write_batch((IMAGES, LABELS, {"boxes": LABELS}), batch, is_short=False)
    with pytest.raises(ValueError, match=r"out\[2\]\['mask'\]: expected a tensor"):
        write_batch((IMAGES, LABELS, {"mask": [LABELS]}), batch, is_short=False)


def test_a_transform_that_returns_no_tensors_is_told(loader_of: MakeLoader) -> None:
    with (
        loader_of(transform=lambda images: None, out=(IMAGES, LABELS)) as loader,
        pytest.raises(ValueError, match=r"out\[0\]: only tensors can be written there; .* returned None"),
    ):
        next(iter(loader))


def test_a_single_tensor_is_refused_when_it_is_given(loader_of: MakeLoader) -> None:
    with pytest.raises(TypeError, match=r"out must be a tuple of tensors.*; found a tensor of uint8"):
        loader_of(out=IMAGES)
    with loader_of() as loader, pytest.raises(TypeError, match="out must be"):
        loader.out = IMAGES  # type: ignore[assignment]
