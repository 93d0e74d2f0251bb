"""A ShardLoader tells its transform enough: augmented pixels depend on (seed, epoch, sample) and nothing else."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import random_picture
from plain_sets import make_plain_set
from torch import Tensor, nn
from transforms import by_torch

from shardio.augment import (
    AlternatingFlip,
    CenterCrop,
    Compose,
    CutMix,
    HorizontalFlip,
    Normalize,
    PerSample,
    RandomChoice,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    Resize,
)
from shardio.augment.chain import Transform
from shardio.changes.change import change
from shardio.changes.merge import merge
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.loading.loader import ShardLoader
from shardio.loading.mixture import Part
from shardio.reading.shardset import ShardSet, open_shards
from shardio.sets.publish import publish
from shardio.sets.selection import Selection

NUM_SAMPLES = 53
USUAL = Compose([RandomResizedCrop(12), HorizontalFlip(), Normalize("imagenet")])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("transform") / "set"
    rng = np.random.default_rng(1)
    with ShardWriter(out, (20, 18, 3), classes=[str(i) for i in range(5)], shard_nbytes=20_000) as writer:
        for i in range(NUM_SAMPLES):
            writer.append(random_picture(rng, 20, 18), i % 5)
    return out


@pytest.mark.parametrize(
    ("options", "mixed"),
    [
        ({"tail": "short"}, False),
        ({"epoch_batches": 4, "indices": range(0, 50, 2)}, False),
        ({"epoch_batches": 9}, True),
    ],
)
def test_alternating_flip_flips_a_sample_at_every_other_look(path: Path, options: dict[str, Any], mixed: bool) -> None:
    where: Any = [Part(path, share=2), Part(path, indices=[3, 5, 8, 13])] if mixed else path
    flip, looks = AlternatingFlip(), dict[Any, list[bool]]()
    with (
        ShardLoader(where, 7, device="cpu", return_indices=True, **options) as plain,
        ShardLoader(where, 7, device="cpu", transform=flip, **options) as loader,
    ):
        for _ in range(8):
            for (stored, _, indices, *more), (images, *_) in zip(plain, loader, strict=True):
                for i, index in enumerate(indices.tolist()):
                    source = more[0]["source"][i].item() if mixed else 0
                    looks.setdefault((source, index), []).append(bool((images[i] != stored[i]).any()))
    assert len(looks) > 20
    assert all(one != other for flips in looks.values() for one, other in pairwise(flips))
    assert {flips[0] for flips in looks.values()} == {False, True}


@pytest.mark.parametrize("options", [{"weights": [1.0] * 53}, {"indices": [7] * 32}, {"repeats": 2}])
def test_alternating_flip_is_refused_where_samples_repeat_within_a_pass(path: Path, options: dict[str, Any]) -> None:
    with (
        ShardLoader(path, 8, device="cpu", transform=AlternatingFlip(), **options) as loader,
        pytest.raises(ValueError, match="AlternatingFlip"),
    ):
        next(iter(loader))


@pytest.mark.parametrize(
    ("options", "mixed"),
    [
        ({"weights": [1.0] + [0.0] * 52, "epoch_batches": 2}, False),
        ({"indices": [7] * 32}, False),
        ({"indices": range(32), "repeats": 2}, False),
        ({"epoch_batches": 2}, True),
    ],
)
def test_a_sample_that_comes_again_in_an_epoch_is_augmented_otherwise(
    path: Path, options: dict[str, Any], mixed: bool
) -> None:
    where: Any = [Part(path, share=2), Part(path, indices=[3, 5, 8, 13])] if mixed else path
    options = {"device": "cpu", "transform": USUAL, **options}

    def drawn(world_size: int, state: Any = None) -> list[Tensor]:
        ranks = []
        for rank in range(world_size):
            with ShardLoader(where, 16 // world_size, rank=rank, world_size=world_size, **options) as loader:
                loader.load_state_dict(state or loader.state_dict())
                ranks.append([images for images, *_ in loader])
        return [image for step in zip(*ranks, strict=True) for images in step for image in images]

    alone = drawn(1)
    assert len({image.numpy().tobytes() for image in alone}) == 32
    assert all(torch.equal(*pair) for pair in zip(drawn(2), alone, strict=True))
    with ShardLoader(where, 16, **options) as loader:
        next(iter(loader))
        rest = drawn(2, loader.state_dict())
    assert len(rest) == 16
    assert all(map(torch.equal, rest, alone[16:]))


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("num_classes", [2, 5, 9])
def test_labels_are_mixed_for_the_classes_of_the_set_only(
    path: Path, tmp_path: Path, is_named: bool, num_classes: int
) -> None:
    """Without names, a set may have classes that none of its labels is of."""
    out = path if is_named else tmp_path / "set"
    if not is_named:
        with ShardWriter(out, (20, 18, 3), classes=[]) as writer:
            for i in range(16):
                writer.append(np.zeros((20, 18, 3), np.uint8), i % 5)
    transform = Compose([RandomResizedCrop(8), RandomChoice([CutMix(num_classes)])])
    if num_classes == 5 or (num_classes > 5 and not is_named):
        with ShardLoader(out, 8, device="cpu", transform=transform) as loader:
            assert next(iter(loader))[1].shape == (8, num_classes)
        return
    with pytest.raises(ValueError, match=r"num_classes(=| of at least )5"):
        ShardLoader(out, 8, device="cpu", transform=transform)


class NoteSizes(Transform):
    """The sizes that a loader tells of the pictures."""

    def __init__(self) -> None:
        self.sizes: dict[int, tuple[int, int]] = {}

    def apply(self, batch: Any, purpose: str) -> Any:
        self.sizes.update(zip(batch.draws.counters.tolist(), map(tuple, batch.sizes.tolist()), strict=True))
        return batch


def test_a_transform_knows_the_true_sizes_of_squashed_pictures_which_are_read_only_if_they_are_wanted(
    squashed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    copy_column = ShardSet.copy_column

    def noted(self: ShardSet, name: str, indices: Any) -> Any:
        asked.append(name)
        return copy_column(self, name, indices)

    monkeypatch.setattr(ShardSet, "copy_column", noted)
    for io in ("mmap", "pread"):
        asked.clear()
        with ShardLoader(squashed, 4, device="cpu", io=io, prefetch=3) as loader:
            list(loader)
            assert not {"source_height", "source_width"} & set(asked)
            loader.transform = notes = NoteSizes()
            list(loader)
            index = loader.shards.index
        sizes = zip(index["source_height"].tolist(), index["source_width"].tolist(), strict=True)
        assert notes.sizes == dict(enumerate(sizes))
        assert {"source_height", "source_width"} <= set(asked)


def written_again(out: Path, new: Path) -> None:
    with ShardWriter(new, (48, 48, 3), classes=["a"], squashed=True) as writer:
        opened = open_shards(out)
        for (image, label), row in zip(opened, opened.index, strict=True):
            size = int(row["source_height"]), int(row["source_width"])
            writer.append(image, label, key=bytes(row["key"]), source_size=size)


def merged_from_parts(out: Path, new: Path) -> None:
    parts = new.with_name("part-0"), new.with_name("part-1")
    for part, indices in zip(parts, (range(0, 16, 2), range(1, 16, 2)), strict=True):
        change(out, part, keep=Selection(indices=list(indices)))
    merge(parts, new)


@pytest.mark.parametrize(
    "make",
    [
        lambda out, new: change(out, new, keep=Selection(indices=np.arange(16)[::-1]), arrays={"score": np.zeros(16)}),
        lambda out, new: publish(out, new),
        merged_from_parts,
        written_again,
    ],
    ids=["change", "publish", "merge", "ShardWriter"],
)
def test_a_set_made_of_a_squashed_one_is_evaluated_as_that_one_is(
    make: Callable[[Path, Path], object], squashed: Path, tmp_path: Path
) -> None:
    def evaluated(out: Path) -> dict[bytes, torch.Tensor]:
        with ShardLoader(
            out, 1, device="cpu", transform=Compose([Resize(40), CenterCrop(32)]), shuffle=False
        ) as loader:
            images = torch.cat([images for images, _ in loader])
            return dict(zip(loader.shards.index["key"].tolist(), images, strict=True))

    make(squashed, tmp_path / "new")
    before, after = evaluated(squashed), evaluated(tmp_path / "new")
    common = before.keys() & after.keys()
    assert len(common) == 16
    assert all(torch.equal(before[key], after[key]) for key in common)


FLIP = HorizontalFlip()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_plain_set(tmp_path_factory.mktemp("foreign"), 64, (12, 10, 3))


def loaded(plain: Path, transform: Any, batch_size: int = 16, num_epochs: int = 1, **options: Any) -> list[Tensor]:
    with ShardLoader(plain, batch_size, device="cpu", transform=transform, seed=3, **options) as loader:
        return [images for _ in range(num_epochs) for images, *_ in loader]


class Module(nn.Module):
    """A torch module that calls a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, images: Any) -> Any:
        return self.function(images)


def here_alone(images: Tensor) -> Tensor:
    assert threading.current_thread() is threading.main_thread()
    return images.mul_(2)


@pytest.mark.parametrize("transform", [by_torch, torch.Tensor.float, Module(by_torch), here_alone])
def test_a_function_is_called_once_with_each_batch_in_the_thread_that_asks_for_it(plain: Path, transform: Any) -> None:
    torch.manual_seed(1)
    found = loaded(plain, transform)
    torch.manual_seed(1)
    assert all(map(torch.equal, found, [transform(images) for images in loaded(plain, None)]))


@pytest.mark.parametrize("wrap", [lambda transform: lambda images: transform(images), Module])
def test_a_transform_that_a_function_calls_draws_as_if_it_had_been_handed_over(
    plain: Path, squashed: Path, wrap: Callable[[Any], Any]
) -> None:
    for path, transform in ((plain, Compose([RandomCrop(8), RandomErasing(0.5)])), (squashed, USUAL)):
        found = loaded(path, wrap(transform), num_epochs=2)
        expected = loaded(path, transform, num_epochs=2)
        assert all(map(torch.equal, found, expected))


def test_two_calls_in_one_function_and_parts_of_a_batch_draw_different_numbers(plain: Path) -> None:
    for images in loaded(plain, lambda images: torch.cat([FLIP(images), FLIP(images)], dim=1)):
        assert not torch.equal(images[:, :3], images[:, 3:])
    (whole,) = loaded(plain, None, 64, shuffle=False)
    (halves,) = loaded(plain, lambda images: torch.cat([FLIP(images[:32]), FLIP(images[32:])]), 64, shuffle=False)
    flipped = [not torch.equal(one, other) for one, other in zip(halves, whole, strict=True)]
    assert flipped[:32] != flipped[32:]


class Ending(Transform):
    """A transform of the user's own."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def apply(self, batch: Any, purpose: str) -> Any:
        self.function(batch)
        return batch


@pytest.mark.parametrize("wrap", [lambda function: function, PerSample, Ending])
def test_a_stop_iteration_of_the_transform_is_an_error_and_not_the_end_of_the_epoch(
    wrap: Callable[[Any], Any], plain: Path
) -> None:
    def function(images: Any) -> Any:
        next(numbers)
        return images

    numbers = iter(range(0))
    with ShardLoader(plain, 16, device="cpu") as loader:
        loader.transform = wrap(function)
        with pytest.raises(RuntimeError, match="transform raised StopIteration") as caught:
            list(loader)
        assert isinstance(caught.value.__cause__, StopIteration)
        with pytest.raises(RuntimeError, match="StopIteration"):
            loader.peek()
        numbers = itertools.count()  # type: ignore[assignment]
        assert len(list(loader)) == 4
        assert loader.state_dict()["epoch"] == 2


MADE, WHOLE, KEEP = Compose([Resize(60), CenterCrop(48)]), CenterCrop(48), HorizontalFlip(0.0)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda transform: lambda images: torch.cat([transform(part) for part in images.chunk(2)]),
        lambda transform: lambda images: torch.stack([transform(images[i::2]) for i in range(2)], 1).flatten(0, 1),
        lambda transform: lambda images: transform(images.clone()),
    ],
    ids=["halves", "every other", "copy"],
)
def test_a_transform_knows_the_samples_and_sizes_of_the_parts_of_a_batch(
    plain: Path, squashed: Path, wrap: Callable[[Any], Any]
) -> None:
    for path in (plain, squashed):
        assert all(map(torch.equal, loaded(path, wrap(USUAL), 8), loaded(path, USUAL, 8)))


@pytest.mark.parametrize(
    "function",
    [
        lambda images: MADE(KEEP(images)),  # still squashed
        lambda images: torch.cat([KEEP(WHOLE(part)) for part in MADE(images).split(3)]),
        lambda images: WHOLE(MADE(images).clone(), sizes=[(48, 48)] * len(images)),
        lambda images: MADE(KEEP(images) // 1),
    ],
)
def test_a_transform_knows_whether_the_result_of_another_is_still_squashed(
    squashed: Path, function: Callable[[Tensor], Tensor]
) -> None:
    assert all(map(torch.equal, loaded(squashed, function), loaded(squashed, MADE)))


@pytest.mark.parametrize("count", [2, 3])
def test_samples_that_come_twice_in_a_padded_batch_are_no_overlap(plain: Path, count: int) -> None:
    def twice(images: Tensor) -> Tensor:
        return torch.cat([FLIP(KEEP(part)) for part in images.chunk(count)])

    with ShardLoader(plain, 100, tail="pad", device="cpu", transform=twice) as loader:
        ((images, _),) = loader
        assert len(images) == 100


def test_a_transform_in_a_function_for_each_image_draws_by_its_sample(plain: Path) -> None:
    each = PerSample(lambda image: FLIP(image[None])[0])
    assert all(map(torch.equal, loaded(plain, lambda images: each(images)), loaded(plain, each)))


@pytest.mark.parametrize(
    ("is_squashed", "function", "word"),
    [
        (False, lambda images: FLIP(torch.cat([images, images])), "indices"),
        (False, lambda images: FLIP(images[torch.arange(3)]), "indices"),
        (False, lambda images: torch.cat([FLIP(images[:9]), FLIP(images[7:])]), "overlap"),
        (True, lambda images: MADE(images[:, :, 1:]), "sizes"),
        (True, lambda images: KEEP(images.transpose(2, 3)), "sizes"),
        (True, lambda images: WHOLE(MADE(images).clone()), "sizes"),
    ],
)
def test_images_that_a_loader_does_not_know_are_refused(
    plain: Path, squashed: Path, is_squashed: bool, function: Callable[[Tensor], Tensor], word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        loaded(squashed if is_squashed else plain, function)


def test_a_batch_in_the_loop_is_augmented_afresh(plain: Path) -> None:
    batches = loaded(plain, None, shuffle=False)
    patterns = {tuple((FLIP(images) == images).flatten(1).all(1).tolist()) for _ in range(3) for images in batches}  # type: ignore[union-attr]
    assert len(patterns) == 3 * len(batches)
