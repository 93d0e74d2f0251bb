#!/usr/bin/env python
"""Combines sets, loader options and forms of transforms at random, and compares every sample with a slow reference.

    python tools/chaos/off_path.py [--combinations 5000] [--seed 0] [--folder PATH]

A combination takes a set that was cropped, squashed or padded and is stored as rgb or yuv420, changes it up to three
times, and reads it, or a mixture with another set, by a loader with random options, on one to three ranks, with a
transform in some form: ours handed over or wrapped, or a foreign one. The reference has the source images and plain
Python: it places each image as `--fit` says, stores it as docs/format.md says, follows the changes, and transforms each
sample alone, resizing planes of yuv420 by plain arithmetic. Pixels, labels, masks and the order must be equal; or the
combination must be refused, for the reason that the reference expects. The reasons and the pages that give them are in
`REASONS`.

Exit code 1 if anything was otherwise, or if fewer than 85% of the combinations delivered samples.
"""

from __future__ import annotations

import math
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import attack
import numpy as np
import torch
from attack import Counts, Rounds, Say, make_parser, verdict
from numpy.typing import NDArray
from PIL import Image
from plain_yuv420 import plain_picture, plain_rgb, plain_window, plain_yuv420

import shardio
from shardio import ShardLoader
from shardio.augment import (
    CenterCrop,
    ColorJitter,
    Compose,
    HorizontalFlip,
    Mixup,
    Normalize,
    Pad,
    PerSample,
    RandomAffine,
    RandomApply,
    RandomChoice,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    Resize,
    ToDtype,
    Transform,
    VerticalFlip,
    Views,
    stage,
)
from shardio.conversion.options import FitMode, Pixels
from shardio.errors import ShardioError
from shardio.kernels.resample import Planes

STAGE: Any = stage
SIZE = (24, 32)
CLASSES = ("ant", "bee", "cat")
NAMES = ("images", "labels", "arrays")
FITS: tuple[FitMode, ...] = ("crop", "squash", "pad")
KINDS: tuple[Pixels, ...] = ("rgb", "yuv420")
LEAST_DELIVERED = 0.85


@dataclass(frozen=True)
class Reason:
    """Why a combination is refused: the error, a word of its message, and the page and the words that announce it."""

    error: type[Exception]
    word: str
    page: str
    announced: str


REASONS = {
    "sets of other fits": Reason(ShardioError, "squash", "guide/change.md", "squash"),
    "sets of both kinds": Reason(ShardioError, "--pixels", "guide/change.md", "--pixels"),
    "the same images": Reason(ShardioError, "same_images", "guide/change.md", "--same-images"),
    "a foreign random transform": Reason(ValueError, "PerSample", "guide/augment.md", "PerSample"),
    "a foreign transform of masks": Reason(ValueError, "only", "guide/augment.md", "gets only the images"),
    "other numbers of classes": Reason(ValueError, "num_classes", "guide/augment.md", "num_classes"),
    "mixing with masks": Reason(ValueError, "mask", "guide/augment.md", "refuse masks"),
}


# --- the reference: source images, and what becomes of them ----------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """A sample as it must be stored."""

    key: bytes
    label: str
    pixels: NDArray[np.uint8]
    image: NDArray[np.uint8]
    """The source image."""
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    row: NDArray[np.uint8] | None = None
    """The stored row of yuv420."""


@dataclass(frozen=True)
class Model:
    folder: Path
    fit: str
    classes: tuple[str, ...]
    samples: tuple[Sample, ...]
    pixels: str = "rgb"
    kinds: Mapping[str, str] = field(default_factory=dict)
    shares: Mapping[str, int] = field(default_factory=dict)
    """The sets of a mixture, whose samples follow each other. The first is `folder`, with `num_first` samples."""
    num_first: int = 0

    @property
    def masks(self) -> list[str]:
        return [name for name, kind in self.kinds.items() if kind == "mask"]


def draw_images(folder: Path, seed: int, count: int) -> dict[bytes, NDArray[np.uint8]]:
    """Draws smooth pictures of random sizes as CLASS/NUMBER.png. Returns them by key."""
    rng = np.random.default_rng(seed)
    images = {}
    for number in range(count):
        height, width = (int(n) for n in rng.integers(20, 60, 2))
        coarse = Image.fromarray(rng.integers(0, 256, (3, 3, 3), dtype=np.uint8))
        path = folder / CLASSES[number % 3] / f"{seed}-{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = coarse.resize((width, height), Image.Resampling.BICUBIC)
        picture.save(path)
        images[str(path.relative_to(folder)).encode()] = np.asarray(picture)
    return images


def placed(image: NDArray[np.uint8], fit: str) -> NDArray[np.uint8]:
    """Returns the sample of an image as docs/guide/convert.md describes `--fit`, by torch's operations."""
    (height, width), (rows, columns) = image.shape[:2], SIZE
    if fit == "squash":
        return resized(image, SIZE)
    scale_by_width = height * columns >= width * rows
    if fit == "pad":
        scale_by_width = not scale_by_width
    across = columns if scale_by_width else rows * width // height
    down = columns * height // width if scale_by_width else rows
    small = resized(image, (max(down, 1), max(across, 1)))
    top, left = round((small.shape[0] - rows) / 2), round((small.shape[1] - columns) / 2)
    if fit == "crop":
        return small[top : top + rows, left : left + columns]
    sample = np.zeros((*SIZE, 3), np.uint8)
    sample[-top : small.shape[0] - top, -left : small.shape[1] - left] = small
    return sample


def resized(image: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    batch = torch.from_numpy(image.copy())[None].permute(0, 3, 1, 2)
    small = torch.nn.functional.interpolate(batch, size=size, mode="bicubic", antialias=True)
    return small[0].permute(1, 2, 0).numpy()


# --- changes of sets -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A call that makes a set, the set that it should make, and the reason for which it must be refused, if any."""

    name: str
    call: Callable[[], object]
    model: Model
    reason: str | None = None


class Changer:
    """Draws changes of sets. `bases` are other sets, by fit, kind of pixels and name."""

    def __init__(self, rng: random.Random, bases: Mapping[tuple[str, str, str], Model]) -> None:
        self._rng = rng
        self._bases = bases

    def draw(self, old: Model, new: Path) -> Change:
        kinds = [self.keep, self.arrays, self.arrays, self.labels, self.merge]
        return self._rng.choice(kinds)(old, new)

    def keep(self, old: Model, new: Path) -> Change:
        count = len(old.samples)
        indices = self._rng.sample(range(count), self._rng.randint(max(1, count // 2), count))
        made = replace(old, folder=new, samples=tuple(old.samples[i] for i in indices))
        return Change("keep", lambda: shardio.change(old.folder, new, keep=shardio.Selection(indices=indices)), made)

    def arrays(self, old: Model, new: Path) -> Change:
        rng, count = np.random.default_rng(self._rng.getrandbits(32)), len(old.samples)
        name = self._rng.choice(["mask", "vector", "year"])
        kind: Any = "mask" if name == "mask" else "array"
        values: NDArray[Any]
        if kind == "mask":
            values = rng.integers(1, 200, (count, *SIZE), dtype=np.uint8)
        elif name == "year":
            values = rng.integers(1990, 2030, count)
        else:
            values = rng.standard_normal((count, 3)).astype("<f4")
        made = tuple(replace(one, arrays={**one.arrays, name: values[i]}) for i, one in enumerate(old.samples))
        given, keys = values, None
        if len({sample.key for sample in old.samples}) == count and self._rng.random() < 0.5:
            mixed = rng.permutation(count)
            keys, given = [old.samples[i].key for i in mixed], values[mixed]
        return Change(
            "arrays",
            lambda: shardio.change(old.folder, new, arrays={name: given}, kinds={name: kind}, array_keys=keys),
            replace(old, folder=new, samples=made, kinds={**old.kinds, name: kind}),
        )

    def labels(self, old: Model, new: Path) -> Change:
        keys = {sample.key for sample in self._rng.choices(old.samples, k=3)}
        labels = {key: self._rng.choice(old.classes) for key in keys}
        samples = tuple(replace(sample, label=labels.get(sample.key, sample.label)) for sample in old.samples)
        return Change(
            "labels",
            lambda: shardio.change(old.folder, new, labels=labels),
            replace(old, folder=new, samples=samples),
        )

    def merge(self, old: Model, new: Path) -> Change:
        fit = old.fit if self._rng.random() < 0.8 else self._rng.choice(FITS)
        pixels = old.pixels if self._rng.random() < 0.95 else self._rng.choice(KINDS)
        other = self._bases[fit, pixels, "more" if self._rng.random() < 0.8 else "again"]
        reason = "sets of other fits" if fit != old.fit and "squash" in (fit, old.fit) else None
        reason = reason if pixels == old.pixels else "sets of both kinds"
        options: dict[str, Any] = {"only_common": True, "same_keys": "allow"}
        stored = {sample.pixels.tobytes() for sample in old.samples}
        if reason is None and any(sample.pixels.tobytes() in stored for sample in other.samples):
            if self._rng.random() < 0.2:
                reason = "the same images"
            else:
                options["same_images"] = "keep"
        # Only one of the sets has arrays, so that they are left out.
        samples = tuple(replace(sample, arrays={}) for sample in (*old.samples, *other.samples))
        made = Model(new, old.fit, old.classes, samples, old.pixels)
        return Change("merge", lambda: shardio.merge([old.folder, other.folder], new, **options), made, reason)


def mixture_of(model: Model, other: Model, shares: tuple[int, int]) -> Model:
    """Returns the model of a mixture of two sets."""
    pixels = "rgb" if model.pixels == other.pixels == "rgb" else "yuv420"
    both = dict(zip((str(model.folder), str(other.folder)), shares, strict=True))
    samples = tuple(replace(sample, arrays={}) for sample in (*model.samples, *other.samples))
    return replace(model, samples=samples, pixels=pixels, kinds={}, shares=both, num_first=len(model.samples))


# --- forms of transforms ---------------------------------------------------------------------------------------------


def draw_chain(rng: random.Random, fit: str) -> list[Transform]:
    """Draws a chain of our transforms, for samples of `SIZE`. Squashed pictures have several sizes until a crop or a
    resize makes them equal."""
    shapes: list[list[Transform]] = [
        [RandomResizedCrop(16, (0.2, 1))],
        [Resize(20), CenterCrop(16)],
        [CenterCrop((12, 20))],
        [RandomCrop(18) if fit == "squash" else RandomCrop((20, 24), padding=3)],
        [RandomResizedCrop((18, 12)), HorizontalFlip()],
        [RandomResizedCrop(18) if fit == "squash" else Pad(2), RandomAffine(20, (0.1, 0.1))],
        [Resize(SIZE)] if fit == "squash" else [],
        [Resize(20), RandomCrop(24, fill=90, pad_if_needed=True)],
        [Resize(20), HorizontalFlip(), Resize((14, 15))],
        [CenterCrop(30, "edge"), HorizontalFlip(), RandomResizedCrop((16, 18), interpolation="random")],
        [CenterCrop((12, 20)), RandomApply([VerticalFlip()], 0.3), Resize((10, 12))],
        [CenterCrop((12, 20)), RandomChoice([ColorJitter(0.4), HorizontalFlip(1.0)], (0.3, 0.7)), Resize((10, 12))],
    ]
    colors: list[list[Transform]] = [[], [], [ColorJitter(0.4, 0.4)], [RandomErasing(0.5)], [HorizontalFlip()]]
    ends: list[list[Transform]] = [[], [], [Normalize("imagenet")], [Normalize("imagenet"), ToDtype(torch.bfloat16)]]
    return [*rng.choice(shapes), *rng.choice(colors), *rng.choice(ends)]


def flip_all(images: torch.Tensor) -> torch.Tensor:
    return images.flip(-1) if torch.rand(()) < 0.5 else images


class RandomHorizontalFlip:
    """As torchvision's: one draw for all pictures of a batch."""

    __module__ = "torchvision.transforms.v2"

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return flip_all(images)


def flip_by_python(images: torch.Tensor) -> torch.Tensor:
    return images.flip(-1) if random.random() < 0.5 else images


def brighten_by_numpy(images: torch.Tensor) -> torch.Tensor:
    return images // int(np.random.randint(1, 4))


def darken(images: torch.Tensor) -> torch.Tensor:
    return images // 2


class Module(torch.nn.Module):
    """Calls a transform, as the first layer of a network does."""

    def __init__(self, transform: Transform) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, images: torch.Tensor) -> Any:
        return self.transform(images)


@dataclass(frozen=True)
class Form:
    """A transform as it is given, and what of it the reference applies: to each sample alone, unless it mixes."""

    name: str
    given: Any
    plain: Callable[..., Any] | None
    sees_masks: bool = True
    reason: str | None = None


def evaluated(picture: NDArray[np.uint8]) -> torch.Tensor:
    """Returns what `EVALUATION` makes of a picture, by Pillow."""
    height, width = picture.shape[:2]
    size = (20, 20 * height // width) if width < height else (20 * width // height, 20)
    left, top = (round((side - 16) / 2) for side in size)
    small = Image.fromarray(picture).resize(size, Image.Resampling.BILINEAR)
    pixels = np.array(small.crop((left, top, left + 16, top + 16)))
    return torch.from_numpy(pixels).permute(2, 0, 1)[None]


# How often each form is drawn.
FORMS = {
    "none": 6,
    "ours": 39,
    "evaluation": 8,
    "views": 8,
    "mixing": 8,
    "wrapped": 14,
    "foreign": 6,
    "per sample": 7,
    "foreign random": 2,
    "other classes": 2,
}
EVALUATION = Compose([Resize(20), CenterCrop(16)])
# Gray levels, in the mean: pictures are resized once by Pillow, and twice here if they were squashed. Of a squashed
# picture that is taken for the true one, it is 4 to 37.
CLOSE = 1.5


def draw_form(rng: random.Random, model: Model) -> Form:
    """Draws a transform and how it is given."""
    name = rng.choices(list(FORMS), list(FORMS.values()))[0]
    mask_fill, num_classes = rng.choice([0, 255]), len(model.classes)
    parts = draw_chain(rng, model.fit)
    chain = Compose(parts, mask_fill=mask_fill)
    if name == "none":
        return Form(name, None, None)
    if name == "ours":
        return Form(name, chain, chain)
    if name == "evaluation":
        return Form(name, EVALUATION, EVALUATION)
    if name == "views":
        views: Transform = Views([Compose(parts), Compose(draw_chain(rng, model.fit))], mask_fill=mask_fill)
        if rng.random() < 0.5:  # of a crop that they share
            several = [Compose([ColorJitter(0.4)]), Compose([RandomCrop(8, step=4), Normalize("imagenet")])]
            crop = [RandomResizedCrop(16), HorizontalFlip(), Views([*several, several[1]])]
            views = Compose(crop, mask_fill=mask_fill)
        return Form(name, views, views)
    if name in ("mixing", "other classes"):
        number = num_classes if name == "mixing" else num_classes + rng.choice([-1, 1, 997])
        mix = Compose([RandomResizedCrop(16), Normalize("imagenet"), Mixup(number, 0.4, per_sample=rng.random() < 0.5)])
        return Form(name, mix, mix, reason=None if name == "mixing" else "other numbers of classes")
    if name == "wrapped":
        wrapped = rng.choice([lambda images: chain(images), partial(chain), Module(chain)])
        return Form(name, wrapped, chain, sees_masks=False)
    if name == "foreign":
        return Form(name, darken, lambda images, **_: darken(images), sees_masks=False)
    drawing = rng.choice([flip_all, flip_by_python, brighten_by_numpy])
    if name == "per sample":
        # Of a squashed picture it is given the true one, and there must be one size.
        each = Compose([RandomResizedCrop(16), PerSample(drawing)]) if model.fit == "squash" else PerSample(drawing)
        return Form(name, each, each, sees_masks=False)
    return Form(name, RandomHorizontalFlip(), None, reason="a foreign random transform")


# --- loaders ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """How a set is read: the options of all ranks' loaders, and after how many steps they are made anew."""

    options: Mapping[str, Any]
    world_size: int
    arrays: tuple[str, ...]
    epoch: int
    stop_after: int | None

    @property
    def repeats(self) -> bool:
        indices = self.options.get("indices", ())
        return bool({"weights", "epoch_batches"} & self.options.keys()) or len(set(indices)) < len(indices)


def draw_reading(rng: random.Random, model: Model, form: Form, cache: Path) -> Reading:
    count = len(model.samples)
    options: dict[str, Any] = {
        "seed": rng.randrange(1000),
        "shuffle": rng.choice([True, True, False, "block"]),
        "tail": rng.choice(["drop", "pad", "short"]),
        "num_threads": rng.randint(1, 2),
        "prefetch": rng.randint(1, 3),
        "io": rng.choice(["auto", "mmap", "pread", "direct"]),
        "check": rng.choice(["off", "sample"]),
    }
    chance = rng.random()
    if model.shares:
        options |= {"tail": "drop", "epoch_batches": rng.randint(1, 6)}
    elif chance < 0.15:
        options |= {"weights": [rng.random() + 0.01 for _ in range(count)], "shuffle": True}
    elif chance < 0.4:
        options["indices"] = rng.choices(range(count), k=count)
    if rng.random() < 0.3:
        options["cache"] = cache
    world_size = rng.choice([1, 1, 2, 3])
    most = len(options.get("indices", range(count))) // world_size
    options["batch_size"] = rng.randint(1, max(1, min(7, most)))
    arrays = [name for name in model.kinds if rng.random() < 0.7]
    if not form.sees_masks and rng.random() < 0.8:
        arrays = [name for name in arrays if name not in model.masks]
    stop_after = rng.randint(1, 3) if rng.random() < 0.3 else None
    return Reading(options, world_size, tuple(arrays), rng.randint(0, 3), stop_after)


def refusal(model: Model, form: Form, reading: Reading) -> str | None:
    """Returns why the loader must refuse; None if it must deliver."""
    has_masks = bool(set(reading.arrays) & set(model.masks))
    if form.reason is None and has_masks:
        if not form.sees_masks:
            return "a foreign transform of masks"
        return "mixing with masks" if form.name == "mixing" else None
    return form.reason


def read(model: Model, form: Form, reading: Reading) -> Iterator[tuple[int, int, tuple[Any, ...]]]:
    """Yields (step, rank, batch) of an epoch, by loaders that are made anew from their states once."""
    with ExitStack() as stack:

        def open_all() -> list[ShardLoader]:
            return [
                stack.enter_context(
                    ShardLoader(
                        model.shares or model.folder,
                        transform=form.given,
                        rank=rank,
                        world_size=reading.world_size,
                        arrays=reading.arrays,
                        return_indices=True,
                        device="cpu",
                        **reading.options,
                    )
                )
                for rank in range(reading.world_size)
            ]

        loaders = open_all()
        for loader in loaders:
            loader.set_epoch(reading.epoch)
        iterators, total = [iter(loader) for loader in loaders], len(loaders[0])
        for step in range(total):
            if step == reading.stop_after:
                again = open_all()
                for new, old in zip(again, loaders, strict=True):
                    new.load_state_dict(old.state_dict())
                iterators = [iter(loader) for loader in again]
            yield from ((step, rank, next(iterator)) for rank, iterator in enumerate(iterators))
        if any(next(iterator, None) is not None for iterator in iterators):
            raise AssertionError(f"more than the {total} batches of len()")


# --- the comparison --------------------------------------------------------------------------------------------------


def positions_of(step: int, rank: int, reading: Reading, total: int) -> list[int]:
    """Returns which positions of the epoch's order a batch holds, as docs/guide/train.md has it."""
    size, ranks = reading.options["batch_size"] * reading.world_size, reading.world_size
    first = step * size
    if reading.options["tail"] == "short":
        size = min(size, total - first)
    return [position % total for position in range(first + size * rank // ranks, first + size * (rank + 1) // ranks)]


def as_image(sample: Sample) -> torch.Tensor:
    return torch.from_numpy(sample.pixels.copy()).permute(2, 0, 1)


def expected_batch(
    model: Model, form: Form, reading: Reading, indices: list[int], counters: list[int]
) -> tuple[Any, torch.Tensor, dict[str, Any]]:
    """Returns images, labels and arrays of a batch, each sample transformed alone where it can be."""
    samples = [model.samples[i] for i in indices]
    images = torch.stack([as_image(sample) for sample in samples])
    labels = torch.tensor([model.classes.index(sample.label) for sample in samples])
    arrays = {name: torch.tensor(np.stack([one.arrays[name] for one in samples])) for name in reading.arrays}
    if model.shares:
        arrays["source"] = (torch.tensor(indices) >= model.num_first).long()
    if form.plain is None:
        return images, labels, arrays
    # A mixture is one endless epoch.
    known: dict[str, Any] = {"seed": reading.options["seed"], "epoch": 0 if model.shares else reading.epoch}
    sizes = [sample.image.shape[:2] for sample in samples] if model.fit == "squash" else None
    if form.name == "mixing":
        mixed, targets = form.plain(images, labels, indices=counters, sizes=sizes, **known)
        return mixed, targets, arrays
    if form.name == "evaluation" and model.pixels == "rgb" and not set(reading.arrays) & set(model.masks):
        pictures = [sample.image if model.fit == "squash" else sample.pixels for sample in samples]
        return torch.cat(list(map(evaluated, pictures))), labels, arrays
    masks = [name for name in reading.arrays if model.kinds[name] == "mask"]
    parts = []
    for i, counter in enumerate(counters):
        one = slice(i, i + 1)
        told = {**known, "indices": [counter], "sizes": None if sizes is None else sizes[one]}
        if masks:
            parts.append(form.plain(images[one], **told, masks={name: arrays[name][one] for name in masks}))
        else:
            parts.append((form.plain(images[one], **told), {}))
    moved = {name: joined([part[1][name] for part in parts]) for name in masks}
    return joined([part[0] for part in parts]), labels, {**arrays, **moved}


@contextmanager
def resizing_planes(rows: Mapping[bytes, NDArray[np.uint8]]) -> Iterator[None]:
    """Has transforms resize planes of yuv420, by plain arithmetic. `rows` has the stored row of a picture by its bytes.
    A wrapped transform is given pictures and resizes these."""
    real, nbytes = STAGE.resample, math.prod(SIZE) * 3

    def resample(planes: Planes, axes: Any, flips: Any, out: Any, affine: Any = None, **how: Any) -> None:
        real(planes, axes, flips, out, affine, **how)
        lines, resized = how.get("lines"), how.get("resized") or out.shape[1:3]
        # Only at the beginning of a picture: the end of another one may be followed by memory that nobody may read.
        firsts = np.flatnonzero(~planes.windows.sides[:, :2].any(axis=1)).tolist()
        for i in firsts if rows and not planes.halved else ():
            place = int(planes.places[i])
            if (row := rows.get(planes.memory[place : place + nbytes].tobytes())) is None:
                continue
            kind = "cubic" if np.broadcast_to(how["cubic"], len(planes))[i] else "bilinear"
            whole = plain_rgb(row, axes[i], resized, kind, how["antialias"], wide=False)
            made = plain_window(whole, out.shape[1:3], how.get("first", (0, 0)), flips[i])
            copy = np.array([[(0.0, 1.0, 0.0, side) for side in made.shape[:2]]])
            there = out[i if lines is None else lines[i]][np.newaxis]
            real(Planes.of_images(made[np.newaxis]), copy, np.zeros(1, bool), there, affine, cubic=False)

    STAGE.resample = resample
    try:
        yield
    finally:
        STAGE.resample = real


def joined(parts: list[Any]) -> Any:
    """Returns the parts of a batch as one, or as a tuple of views."""
    return tuple(map(torch.cat, zip(*parts, strict=True))) if isinstance(parts[0], tuple) else torch.cat(parts)


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(((found.float() - expected.float()).abs().mean(dim=(1, 2, 3)) < CLOSE).all())


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, (tuple, dict)):
        if type(found) is not type(expected) or len(found) != len(expected):
            return False
        keys = expected if isinstance(expected, dict) else range(len(expected))
        return all(same(found[key], expected[key]) for key in keys)
    return bool(found.dtype == expected.dtype and torch.equal(found, expected))


def compare(model: Model, form: Form, reading: Reading) -> str:
    """Reads an epoch. Returns what differs from the reference; "" if nothing does."""
    options, count = reading.options, len(model.samples)
    chosen = options.get("indices", range(count))
    total, start = len(chosen), 0
    found: dict[int, int] = {}
    num_steps = -(-total // (options["batch_size"] * reading.world_size))
    if options["tail"] == "drop":
        num_steps = total // (options["batch_size"] * reading.world_size)
    if model.shares:  # epochs are stretches of an endless one
        num_steps = options["epoch_batches"]
        total, start = sys.maxsize, reading.epoch * num_steps
    last = -1
    for step, rank, batch in read(model, form, reading):
        last = step
        images, labels, indices, *rest = batch
        positions = positions_of(start + step, rank, reading, total)
        if len(indices) != len(positions):
            return f"step {step}, rank {rank}: {len(indices)} samples, not {len(positions)}"
        for position, index in zip(positions, indices.tolist(), strict=True):
            if found.setdefault(position, index) != index:
                return f"position {position}: samples {found[position]} and {index}"
        if not positions:
            continue
        counters = positions if reading.repeats else indices.tolist()
        seen = [model.samples[i] for i in indices.tolist() if form.name != "wrapped"]
        with resizing_planes({sample.pixels.tobytes(): sample.row for sample in seen if sample.row is not None}):
            expected = expected_batch(model, form, reading, indices.tolist(), counters)
        for name, one, other in zip(NAMES, (images, labels, *(rest or [{}])), expected, strict=True):
            by_pillow = form.name == "evaluation" and name == "images" and one.shape == other.shape
            if not (is_close(one, other) if by_pillow else same(one, other)):
                return f"step {step}, rank {rank}: other {name}"
    if last + 1 != num_steps:
        return f"{last + 1} steps, not {num_steps}"
    if model.shares:
        of_first = len(found) * model.shares[str(model.folder)] / sum(model.shares.values())
        is_shared = abs(sum(index < model.num_first for index in found.values()) - of_first) < 2
        return "" if is_shared else "other shares than those of the mixture"
    if options["shuffle"] is False and found != {p: chosen[p] for p in found}:
        return "not the stored order"
    left = Counter(chosen)
    left.subtract(found.values())
    if "weights" not in options and (min(left.values()) < 0 or (len(found) == total and any(left.values()))):
        return "the order is no permutation"
    return ""


# --- the combinations ------------------------------------------------------------------------------------------------


@dataclass
class OffPathCounts(Counts):
    delivered: int = 0
    mixtures: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    forms: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)


class OffPathRounds(Rounds[OffPathCounts]):
    def __init__(self, folder: Path, seed: int, say: Say) -> None:
        super().__init__(folder, seed, say, OffPathCounts())
        self._what = ""
        self._bases: dict[tuple[str, str, str], Model] = {}
        first = draw_images(folder / "first", 1, 17)
        trees = {"main": first, "more": draw_images(folder / "more", 2, 7), "again": {}}
        # Some of the first images once more, with other keys.
        for key, image in list(first.items())[:4]:
            path = folder / "again" / key.decode().replace("/", "/copy-")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
            trees["again"][str(path.relative_to(folder / "again")).encode()] = image
        for fit, pixels, (name, images) in product(FITS, KINDS, trees.items()):
            tree, out = folder / ("first" if name == "main" else name), folder / f"{fit}-{pixels}-{name}"
            shard_size = 4096 + 5 * math.prod(SIZE) * 3
            shardio.convert(tree, out, size=SIZE, fit=fit, pixels=pixels, workers=1, shard_size=shard_size)
            self._bases[fit, pixels, name] = self._model(out, fit, pixels, images)

    def _model(self, out: Path, fit: str, pixels: str, images: Mapping[bytes, NDArray[np.uint8]]) -> Model:
        """Returns what must be stored in `out`. The order is the converter's to choose, and read from its index."""
        keys = [bytes(key) for key in np.load(out / "train-index.npy")["key"]]
        if sorted(keys) != sorted(images):
            self._violation(f"{out.name}: other keys than the images have")
        samples = []
        for key in keys:
            picture, row = placed(images[key], fit), None
            if pixels == "yuv420":
                row = plain_yuv420(picture)
                picture = plain_picture(row)
            samples.append(Sample(key, key.split(b"/")[0].decode(), picture, images[key], row=row))
        return Model(out, fit, CLASSES, tuple(samples), pixels)

    def run(self, combinations: int) -> OffPathCounts:
        for _ in range(combinations):
            self.counts.rounds += 1
            root = self.folder / "round"
            root.mkdir()
            try:
                self._combine(root)
            except Exception as error:
                self._violation(f"{self._what}: {type(error).__name__}: {error}")
            shutil.rmtree(root)
        if self.counts.delivered < LEAST_DELIVERED * combinations:
            self._violation(f"{self.counts.delivered} of {combinations} combinations delivered samples")
        return self.counts

    def _combine(self, root: Path) -> None:
        rng = self._random
        model = self._bases[rng.choice(FITS), rng.choice(KINDS), "main"]
        changed = []
        for number in range(rng.randint(0, 3)):
            change = Changer(rng, self._bases).draw(model, root / str(number))
            changed.append(change.name)
            self._what = f"{model.fit}, {model.pixels}, {changed}"
            self.counts.changes[change.name] += 1
            if self._refuses(change.reason, change.call):
                return
            model = change.model
        if rng.random() < 0.15:
            other = self._bases[model.fit, rng.choice(KINDS), "more"]
            model = mixture_of(model, other, (rng.randint(1, 4), rng.randint(1, 4)))
            self.counts.mixtures += 1
        form = draw_form(rng, model)
        reading = draw_reading(rng, model, form, self.folder / "cache")
        self.counts.forms[form.name] += 1
        shares = list(model.shares.values())
        self._what = f"{model.fit}, {model.pixels}, {changed}, {shares}, {form.name} {form.given!r}, {reading}"
        wrong = ""

        def read_all() -> None:
            nonlocal wrong
            wrong = compare(model, form, reading)

        if self._refuses(refusal(model, form, reading), read_all):
            return
        if wrong:
            self._violation(f"{self._what}: {wrong}")
        self.counts.delivered += 1

    def _refuses(self, reason: str | None, call: Callable[[], object]) -> bool:
        """Calls. Returns whether it was refused, as it must be if there is a reason."""
        if reason is None:
            call()
            return False
        try:
            call()
        except REASONS[reason].error as error:
            if REASONS[reason].word not in str(error):
                raise
            self.counts.refused[reason] += 1
            return True
        self._violation(f"{self._what}: not refused, though: {reason}")
        return True


def off_path(folder: Path, combinations: int, seed: int, say: Say = print) -> OffPathCounts:
    attack.never_sync()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*empty on rank")
        return OffPathRounds(folder, seed, say).run(combinations)


def main() -> int:
    parser = make_parser(__doc__, "the combinations")
    parser.add_argument("--combinations", type=int, default=5000, help="default %(default)s")
    options = parser.parse_args()
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        return verdict(off_path(options.folder, options.combinations, options.seed))
    with tempfile.TemporaryDirectory() as folder:
        return verdict(off_path(Path(folder), options.combinations, options.seed))


if __name__ == "__main__":
    sys.exit(main())
