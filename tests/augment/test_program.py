"""A program makes the pixels of its transform, of what it says that it reads and of nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pictures import as_batch
from transforms import OF_BATCHES, SINGLE, name_of

from shardio.augment import (
    AlternatingFlip,
    CenterCrop,
    ColorJitter,
    Compose,
    CutMix,
    HorizontalFlip,
    Mixup,
    Normalize,
    Pad,
    PerSample,
    RandomApply,
    RandomChoice,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    RandomRotation,
    Resize,
    ToDtype,
    Views,
    recipe,
)
from shardio.augment.boxes import Draws
from shardio.augment.chain import Transform
from shardio.augment.program import Program, makes_pixels
from shardio.augment.recipes import RECIPES
from shardio.augment.stage import Stage
from shardio.kernels.resample import Planes


def flipped(image: torch.Tensor) -> torch.Tensor:
    return image.flip(1)


COUNT = 9
SPLIT: list[Transform] = [
    RandomResizedCrop(24),
    RandomResizedCrop((40, 17), scale=(0.01, 0.02)),
    Compose([RandomResizedCrop(24, interpolation="bicubic"), HorizontalFlip(), Normalize("imagenet")]),
    Compose([RandomResizedCrop(24, antialias=False), AlternatingFlip(), ToDtype(torch.float16)]),
    Compose([HorizontalFlip(), RandomCrop(16), ToDtype(torch.float32, scale=True)]),
    Compose([Resize(30), CenterCrop(24), Normalize("imagenet"), ToDtype(torch.bfloat16)]),
    Compose([Resize((70, 65), antialias=False), HorizontalFlip(), RandomCrop(20), Normalize(0.5, 0.2)]),
    Compose([CenterCrop(20), Resize((31, 9))]),
    Compose([RandomResizedCrop(24, interpolation="random"), HorizontalFlip(), Normalize("imagenet")]),
    Compose([Resize((9, 70), "random", antialias=False), RandomCrop(8)]),
    Compose([RandomResizedCrop(24), ColorJitter(0.4, 0.4, 0.4), HorizontalFlip(), RandomErasing(), Normalize(0, 1)]),
    Compose(
        [RandomResizedCrop(24), RandomApply([RandomRotation(9)]), Normalize(), RandomChoice([Mixup(5), CutMix(5)])]
    ),
    Compose([RandomResizedCrop(24), Normalize("imagenet"), RandomErasing(0.9, value="random")]),
    Compose([RandomResizedCrop(24), HorizontalFlip(), Views([ColorJitter(0.4), Resize(9)])]),
]
MORE: list[Transform] = [
    Views([RandomResizedCrop(24)] * 2),
    Compose([Pad(2), RandomResizedCrop(24)]),
    Compose([Resize(30), RandomResizedCrop(24)]),
    Compose([RandomResizedCrop(24), ColorJitter(0.1), CenterCrop(20)]),
    Compose([RandomResizedCrop(24), RandomApply([CenterCrop(24)])]),
    Compose([RandomCrop(24), RandomApply([PerSample(flipped)]), CutMix(5)]),
    Compose([ColorJitter(0.1), RandomResizedCrop(24)]),
    Compose([CenterCrop(24), Views([Resize(9), Resize(8)])]),
    Compose([CenterCrop(22), PerSample(flipped), RandomResizedCrop(20), Normalize(), CutMix(5)]),
    Compose([RandomChoice([RandomResizedCrop(20), Compose([Pad(4), RandomCrop(20)])]), Resize(15), Normalize()]),
    Compose([RandomCrop(24), Views([*[Compose([RandomResizedCrop(12), ColorJitter(0.2), Normalize()])] * 2, Pad(1)])]),
]


def stored(rng: np.random.Generator, height: int, width: int, channels: int = 3) -> NDArray[np.uint8]:
    return rng.integers(0, 256, (COUNT, height, width, channels), dtype=np.uint8)


def check(transform: Transform, pixels: NDArray[np.uint8], sizes: NDArray[np.int64] | None = None) -> None:
    """Compares both ways."""
    rng = np.random.default_rng(pixels.shape[1])
    samples, labels = rng.integers(0, 1000, COUNT), torch.from_numpy(rng.integers(0, 5, COUNT))
    masks = None if transform.mixes else {"m": torch.from_numpy(rng.integers(0, 9, pixels.shape[:3]))}
    arrays: dict[str, Any] = {} if transform.mixes else {"masks": masks}
    images = as_batch(pixels)
    whole = transform(images, labels, indices=samples, seed=3, epoch=2, sizes=sizes, **arrays)
    for casts in (True, False):
        program = Program.of(transform, Draws(3, 2, samples), pixels.shape[1:], sizes, casts=casts)
        made = [images] * len(program.views)
        if makes_pixels(transform, casts):
            outs = made_in_parts(program, pixels)
            assert [out.tobytes() for out in made_in_place(program, pixels)] == [out.tobytes() for out in outs]
            made = [as_batch(out) for out in outs]
        found, targets, moved = program.finish(made, labels, masks)
        torch.testing.assert_close((found, targets, moved or {}), (*whole, {})[:3], rtol=0, atol=0)


def made_in_parts(program: Program, pixels: NDArray[np.uint8]) -> list[NDArray[Any]]:
    """Returns what a program makes of its windows, of some of the images at a time."""
    seen = [image[program.windows.part(i)].reshape(-1) for i, image in enumerate(pixels)]
    outs = [np.empty(shape, dtype) for shape, dtype in program.results]
    for some in ([0], [1, 3, 8], [2], [4, 5, 6, 7]):
        windows = program.windows[np.array(some)]
        planes = Planes.packed(np.concatenate([seen[i] for i in some]), windows, pixels.shape[3])
        program.make(planes, np.array(some), outs)
    return outs


def made_in_place(program: Program, pixels: NDArray[np.uint8]) -> list[NDArray[Any]]:
    """Returns what a program makes of rows in reverse order, with noise outside of its windows."""
    rows = np.random.default_rng(5).integers(0, 256, pixels.shape, np.uint8)
    for i, image in enumerate(pixels):
        part = program.windows.part(i)
        rows[-1 - i][part] = image[part]
    outs = [np.empty(shape, dtype) for shape, dtype in program.results]
    numbers = np.arange(len(pixels))
    table = rows.reshape(len(rows), -1)
    program.make(Planes.of_rows(table, numbers[::-1], program.windows, pixels.shape[1:]), numbers, outs)
    return outs


@pytest.mark.parametrize("transform", [*SPLIT, *MORE, *SINGLE, *OF_BATCHES], ids=name_of)
def test_windows_alone_give_the_same_pixels(transform: Transform) -> None:
    rng = np.random.default_rng(1)
    for height, width in ((40, 50), (64, 33)):
        check(transform, stored(rng, height, width))
        sizes = rng.integers(40, 200, (COUNT, 2))
        check(transform, stored(rng, height, width), sizes if transform in SPLIT else np.tile(sizes[:1], (COUNT, 1)))
    if transform == RandomResizedCrop(24):
        for channels in (1, 2, 4):
            check(transform, stored(rng, 40, 50, channels))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipes_give_the_same_pixels(name: str) -> None:
    transform = recipe(name, 56)
    assert makes_pixels(transform, True)
    check(transform, stored(np.random.default_rng(2), 80, 80))


def test_a_window_is_no_larger_than_it_must_be() -> None:
    program = Program.of(RandomResizedCrop(224), Draws(0, 0, np.arange(100)), (256, 256, 3))
    (stage,) = program.views[0].stages
    assert isinstance(stage, Stage)
    assert np.array_equal(program.windows.sides, stage.boxes.sides)


@pytest.mark.parametrize("lines", [1, 2, 16, 48])
def test_windows_of_whole_lines_give_the_same_pixels(lines: int) -> None:
    pixels, samples = stored(np.random.default_rng(4), 96, 50), np.arange(COUNT)
    transform = Compose([RandomResizedCrop(24), HorizontalFlip()])
    expected: Any = transform(as_batch(pixels), seed=1, epoch=2, indices=samples)
    least = Program.of(transform, Draws(1, 2, samples), pixels.shape[1:]).windows
    program = Program.of(transform, Draws(1, 2, samples), pixels.shape[1:], whole_lines=lines)
    windows, ends = program.windows, program.windows.tops + program.windows.heights
    assert (windows.tops % lines == 0).all()
    assert (ends % lines == 0).all()
    for more in (least.tops - windows.tops, ends - least.tops - least.heights):
        assert ((more >= 0) & (more < lines)).all()
    assert (windows.lefts == 0).all()
    assert (windows.widths == 50).all()
    (found,) = made_in_parts(program, pixels)
    assert torch.equal(as_batch(found), expected)


def test_a_transform_of_the_users_own_is_left_to_the_whole_batch() -> None:
    for base in (ColorJitter(0.4), RandomResizedCrop(24)):
        own = type("Own", (type(base),), {"__module__": "user"})(**vars(base))
        assert not makes_pixels(own, True)
        program = Program.of(Compose([CenterCrop(30), own]), Draws(0, 0, np.arange(3)), (50, 50, 3))
        assert [part for part, _ in program.views[0].rest] == [own]


def test_only_what_takes_images_on_any_device_is_left_for_a_gpu() -> None:
    flip, erase, mix = PerSample(flipped), RandomErasing(), Mixup(5)
    for parts, host, device in (
        ([RandomCrop(8), Normalize(), mix, erase], [], [Normalize(), mix, erase]),
        ([RandomCrop(8), flip, HorizontalFlip(), Normalize()], [flip, HorizontalFlip()], [Normalize()]),
        ([RandomCrop(8), erase, Normalize()], [], [Normalize()]),
        ([flip, erase, Normalize()], [flip, erase], [Normalize()]),
        ([flip, RandomCrop(8)], [flip, RandomCrop(8)], []),
        ([RandomCrop(8), Normalize(), RandomApply([flip])], [Normalize(), RandomApply([flip])], []),
    ):
        before, after = Program.of(Compose(parts), Draws(0, 0, np.arange(3)), (20, 20, 3), casts=False).split()
        assert [part for part, _ in before.views[0].rest] == host
        assert [part for part, _ in after.views[0].rest] == device
