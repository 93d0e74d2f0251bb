"""Functions of other libraries: called with each sample (`PerSample`), or with whole batches, and watched (`Watch`).

Libraries for single pictures draw once per call. Called with a batch they would give all its pictures the same crop.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from inspect import getclosurevars
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardio.augment.batch import Batch, sizes_of
from shardio.augment.boxes import Loaded
from shardio.augment.chain import Transform
from shardio.augment.targets import Targets

# An event of probability 1/2 that is drawn for each sample looks as if drawn once for all with 2 ** -31.
_DRAWS_COMPARED = 32
_MOST_RUNS = 16

# Generators are of the process: two threads that seed them would disturb each other.
_seeding = threading.RLock()


def of_library(function: object, *names: str) -> bool:
    """Returns whether a function, or one that it is made of, is an object of a class in these modules."""
    kinds = [f"{kind.__module__}." for kind in type(function).__mro__]
    if any(kind.startswith(f"{name}.") for kind in kinds for name in names):
        return True
    inner = list(function.children()) if isinstance(function, torch.nn.Module) else []
    several = getattr(function, "transforms", ())
    if isinstance(several, list | tuple):
        inner += several
    return any(of_library(part, *names) for part in inner)


Generator = torch.Generator | random.Random | np.random.RandomState | np.random.Generator

# How far a function's own generators are searched for, in all that it holds, calls or names.
_DEPTH, _MOST_PARTS = 4, 1000


def _own_generators(function: object) -> list[Generator]:
    """Returns the generators that a function holds, as far as its attributes, closure and globals show."""
    found: list[Generator] = []
    seen: dict[int, object] = {}
    level = [function]
    for _ in range(_DEPTH):
        inner: list[object] = []
        for part in level:
            if id(part) in seen or len(seen) > _MOST_PARTS or isinstance(part, Tensor | ModuleType | type):
                continue
            seen[id(part)] = part
            if isinstance(part, Generator) and not isinstance(part, random.SystemRandom):
                found.append(part)
            elif isinstance(part, FunctionType):
                with suppress(ValueError):  # a variable that has no value yet
                    closed = getclosurevars(part)
                    inner += [*closed.nonlocals.values(), *closed.globals.values()]
            elif isinstance(part, partial):
                inner += [part.func, *part.args, *part.keywords.values()]
            elif isinstance(part, dict | list | tuple):
                inner += part.values() if isinstance(part, dict) else part
            else:  # a method, of Python or of C, has both
                inner += [getattr(part, "__self__", None), getattr(part, "__func__", None)]
                inner += getattr(part, "__dict__", {}).values()
        level = inner
    return found


class _Generators:
    """Generators that libraries share, torch's for the CPU and a device, Python's and NumPy's, and a function's own."""

    def __init__(self, device: torch.device, own: list[Generator]) -> None:
        shared = [torch.default_generator, random.getstate.__self__, np.random.get_state.__self__]  # type: ignore[attr-defined]
        if device.type == "cuda":
            shared.append(torch.cuda.default_generators[device.index or 0])
        self._all: list[Generator] = [*shared, *own]

    def state(self) -> list[Any]:
        return [_state_of(one) for one in self._all]

    def seed(self, number: int) -> None:
        for one in self._all:
            if isinstance(one, torch.Generator):
                one.manual_seed(number)
            elif isinstance(one, np.random.Generator):
                one.bit_generator.state = type(one.bit_generator)(number).state
            else:
                one.seed(number % (1 << 32))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restores the generators in the end."""
        with _seeding:
            before = self.state()
            try:
                yield
            finally:
                for one, state in zip(self._all, before, strict=True):
                    if isinstance(one, torch.Generator):
                        one.set_state(torch.from_numpy(state))
                    elif isinstance(one, np.random.Generator):
                        one.bit_generator.state = state
                    elif isinstance(one, np.random.RandomState):
                        one.set_state(state)
                    else:
                        one.setstate(state)


def _state_of(one: Generator) -> Any:
    if isinstance(one, torch.Generator):
        return one.get_state().numpy()
    if isinstance(one, np.random.Generator):
        return one.bit_generator.state
    return one.get_state(legacy=False) if isinstance(one, np.random.RandomState) else one.getstate()


def _same(one: Any, other: Any) -> bool:
    """Returns whether two states are equal."""
    if isinstance(one, dict):
        return all(_same(part, other[name]) for name, part in one.items())
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)


class Watch:
    """Calls a function with the batches of a loader. Raises ValueError if it draws once for all pictures of a batch.

    A call after which a generator has moved is looked into: the function gets a batch of equal pictures, several
    times. It draws for each picture if their results differ, and once if only the results of another call differ. The
    generator's state alone proves nothing: another thread may have drawn meanwhile.
    """

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        self.function = function
        self._own = _own_generators(function)
        self._num_suspected = 0
        self._draws_for_each = False

    def __call__(self, batch: Loaded) -> Any:
        with batch.here():
            if self._draws_for_each or len(batch.images) < 2:
                return self.function(batch.images)
            generators = _Generators(batch.images.device, self._own)
            before = generators.state()
            made = self.function(batch.images)
        if not all(map(_same, before, generators.state())):
            self._num_suspected += 1
            # A rare event may show in a later batch only. Looking less and less often costs little.
            if self._num_suspected & (self._num_suspected - 1) == 0:
                self._look_into(batch, generators)
        return made

    def _look_into(self, batch: Loaded, generators: _Generators) -> None:
        images, count = batch.images, len(batch.images)
        noise = np.random.default_rng(0).integers(0, 256, images.shape[1:], np.uint8)
        picture = torch.from_numpy(noise).to(images.device)
        # Transforms of shardio draw the same for all of them, each time.
        draws = replace(batch.draws, indices=np.zeros(count, np.int64))
        needed = -(-_DRAWS_COMPARED // (count - 1))
        first: list[Tensor] | None = None
        differs = False
        with generators.kept():
            for run in range(1, max(_MOST_RUNS, needed) + 1):
                alike = replace(batch, images=torch.empty_like(images).copy_(picture), draws=draws, num_calls=0)
                with alike.here():
                    made = _tensors(self.function(alike.images))
                if not all(_alike(some, count) for some in made):
                    if of_library(self.function, "torchvision.transforms"):  # noise of its own may hide a shared crop
                        raise self._drawn_once()
                    self._draws_for_each = True
                    return
                first = first or made
                differs = differs or not all(map(torch.equal, made, first))
                if differs and run >= max(needed, 2):
                    raise self._drawn_once()

    def _drawn_once(self) -> ValueError:
        return ValueError(
            f"transform: {_name(self.function)} draws random numbers once for all pictures of a batch; take the "
            "transforms of these names in shardio.augment, or PerSample(transform) from there, which calls it for each "
            "picture"
        )


def _alike(made: Tensor, count: int) -> bool:
    """Returns whether `count` samples have the same results. Those of several views may follow each other, or be
    stacked, and a sample may have several rows. Without rows for each sample, nothing can be said against it."""
    rows = []
    if made.ndim and not len(made) % count:
        rows = [made.reshape(-1, count, *made.shape[1:]).movedim(1, 0), made.reshape(count, -1)]
    if made.ndim > 4 and made.shape[1] == count:
        rows.append(made.movedim(1, 0))
    return not rows or any(torch.equal(some, some[:1].expand_as(some)) for some in rows)


def check_foreign(function: object, arrays: tuple[str, ...]) -> None:
    """Raises ValueError for what a loader cannot call with batches that have `arrays`, masks and boxes."""
    if arrays:
        raise ValueError(
            f"transform: {_name(function)} gets the pictures alone, and {', '.join(arrays)} would stay where they are; "
            "expected a transform of shardio.augment itself, without a function around it, or PerSample(transform); or "
            "call the function in the loop"
        )
    if of_library(function, "albumentations"):
        raise ValueError(
            f"transform: {_name(function)} takes one picture at a time; expected PerSample(transform) of "
            "shardio.augment, or transforms from there"
        )


def _name(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _tensors(made: Any) -> list[Tensor]:
    if isinstance(made, Tensor | np.ndarray):
        return [torch.as_tensor(made)]
    parts = made.values() if isinstance(made, Mapping) else made if isinstance(made, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


@dataclass
class _Sample:
    """One picture (C, H, W), its masks, and the boxes that there are: (R, 4), with a number for each, (R,)."""

    image: Tensor
    masks: dict[str, Tensor]
    boxes: Tensor
    rows: Tensor


@dataclass(frozen=True, repr=False)
class PerSample(Transform):
    """A transform of torchvision or Albumentations, or any function of one picture, called with each of the batch.

    It gets a tensor (C, H, W), or what Albumentations takes, and returns pictures of one size for all. Masks and boxes
    go along with torchvision's v2 and with an Albumentations Compose (bbox_params of format "pascal_voc"); a box that
    is removed gets the label -1. Other functions are an error if there are any.

    Each call is seeded by (seed, epoch, sample, view): the generators of torch, Python and NumPy and those that the
    function holds, which are restored afterwards. No other thread should draw from them meanwhile.
    """

    transform: Callable[..., Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.transform) or isinstance(self.transform, Transform):
            raise TypeError(f"transform must be a function of one picture, from elsewhere; found {self.transform!r}")

    def apply(self, batch: Batch, purpose: str) -> Batch:
        batch = batch.unsquashed().finished()
        images, targets = batch.images, batch.targets
        call = self._call_for(targets)
        generators = _Generators(images.device, _own_generators(self.transform))
        made: list[_Sample] = []
        with generators.kept():
            for number, key in enumerate(batch.draws.keys(purpose).tolist()):
                seed = key % (1 << 63)
                generators.seed(seed)
                if hasattr(self.transform, "set_random_seed"):  # Albumentations has generators of its own
                    self.transform.set_random_seed(seed % (1 << 32))
                done = call(self.transform, _sample_of(images, targets, number))
                if not isinstance(done.image, Tensor) or done.image.ndim != 3:
                    kind = tuple(done.image.shape) if isinstance(done.image, Tensor) else type(done.image).__name__
                    raise TypeError(f"PerSample: {_name(self.transform)} must return a tensor (C, H, W); found {kind}")
                made.append(done)
        pictures = self._stacked("a picture", [done.image for done in made], batch.draws.indices)
        if targets is not None:
            masks = {
                name: self._stacked(f"masks[{name!r}]", [done.masks[name] for done in made], batch.draws.indices)
                for name in targets.masks
            }
            targets = Targets.of(pictures, masks, _boxes_of(targets, made), targets.fills)
        return Batch(pictures, batch.draws, sizes_of(pictures), batch.labels, targets)

    def _call_for(self, targets: Targets | None) -> Callable[[Callable[..., Any], _Sample], _Sample]:
        if of_library(self.transform, "albumentations"):
            return _by_albumentations
        if targets is None:
            return _alone
        if of_library(self.transform, "torchvision.transforms.v2"):
            return _by_torchvision
        names = ", ".join([*targets.masks, *targets.boxes])
        raise ValueError(
            f"PerSample: {_name(self.transform)} gets the pictures alone, and {names} would stay where they are; "
            "expected transforms of torchvision.transforms.v2, Albumentations or shardio.augment"
        )

    def _stacked(self, what: str, parts: list[Tensor], indices: NDArray[np.int64]) -> Tensor:
        for part, index in zip(parts, indices.tolist(), strict=True):
            if (part.shape, part.dtype) != (parts[0].shape, parts[0].dtype):
                first, found = (f"{some.dtype} {tuple(some.shape)}" for some in (parts[0], part))
                raise ValueError(
                    f"PerSample: expected {what} of {first} for each sample, as for {indices[0]}; found {found} for "
                    f"sample {index}: crop or resize to one size"
                )
        return torch.stack(parts)


def _sample_of(images: Tensor, targets: Targets | None, number: int) -> _Sample:
    if targets is None:
        return _Sample(images[number], {}, images.new_zeros(0, 4), images.new_zeros(0, dtype=torch.int64))
    boxes = torch.cat([torch.zeros(0, 5, device=images.device), *(some[number] for some in targets.boxes.values())])
    rows = torch.nonzero(boxes[:, 4] >= 0)[:, 0]
    return _Sample(images[number], {name: mask[number] for name, mask in targets.masks.items()}, boxes[rows, :4], rows)


def _boxes_of(targets: Targets, made: list[_Sample]) -> dict[str, Tensor]:
    """Returns the boxes by name, each in its old row."""
    if not targets.boxes:
        return {}
    labels = torch.cat([boxes[:, :, 4] for boxes in targets.boxes.values()], dim=1).float()
    everything = torch.zeros(*labels.shape, 5, device=labels.device)
    everything[:, :, 4] = -1
    for number, done in enumerate(made):
        if len(done.boxes) != len(done.rows):
            raise ValueError(
                f"PerSample: expected as many labels as boxes; found {len(done.rows)} and {len(done.boxes)}"
            )
        everything[number, done.rows, :4] = done.boxes.as_subclass(Tensor).to(everything)
        everything[number, done.rows, 4] = labels[number, done.rows]
    ends = np.cumsum([boxes.shape[1] for boxes in targets.boxes.values()])[:-1].tolist()
    return dict(zip(targets.boxes, torch.tensor_split(everything, ends, dim=1), strict=True))


def _alone(transform: Callable[..., Any], sample: _Sample) -> _Sample:
    made = transform(sample.image)
    return replace(sample, image=made.as_subclass(Tensor) if isinstance(made, Tensor) else made)


def _by_torchvision(transform: Callable[..., Any], sample: _Sample) -> _Sample:
    tv = sys.modules["torchvision.tv_tensors"]  # transforms.v2 imports it
    size = tuple(sample.image.shape[1:])
    masks = {name: tv.Mask(mask.movedim(2, 0) if mask.ndim == 3 else mask) for name, mask in sample.masks.items()}
    boxes = tv.BoundingBoxes(sample.boxes, format="XYXY", canvas_size=size)
    # SanitizeBoundingBoxes removes labels together with their boxes.
    made = transform({"image": tv.Image(sample.image), "masks": masks, "boxes": boxes, "labels": sample.rows})
    moved = {name: mask.as_subclass(Tensor) for name, mask in made["masks"].items()}
    return _Sample(
        made["image"].as_subclass(Tensor),
        {name: mask.movedim(0, 2) if mask.ndim == 3 else mask for name, mask in moved.items()},
        made["boxes"],
        made["labels"],
    )


def _by_albumentations(transform: Callable[..., Any], sample: _Sample) -> _Sample:
    device, names = sample.image.device, list(sample.masks)
    given: dict[str, Any] = {"image": _array(sample.image.movedim(0, 2))}
    if len(names) == 1:
        given["mask"] = _array(sample.masks[names[0]])
    elif names:
        given["masks"] = [_array(mask) for mask in sample.masks.values()]
    params = getattr(getattr(transform, "processors", {}).get("bboxes"), "params", None)
    fields = list(getattr(params, "label_fields", None) or ())
    if len(sample.boxes) or params is not None:
        if params is None or params.format != "pascal_voc":
            found = "none" if params is None else repr(params.format)
            raise ValueError(f'PerSample: bbox_params must have the format "pascal_voc" for boxes; found {found}')
        rows = _array(sample.rows)
        given["bboxes"] = np.concatenate([_array(sample.boxes), rows[:, None].astype(np.float32)], axis=1)
        given.update(dict.fromkeys(fields, rows))
    made = transform(**given)
    image = _tensor(made["image"], device)
    if not isinstance(made["image"], Tensor):
        image = image[None] if image.ndim == 2 else image.movedim(2, 0)
    boxes = torch.tensor(np.asarray(made.get("bboxes", ()), np.float32).reshape(-1, 5), device=device)
    moved = [made["mask"]] if len(names) == 1 else made.get("masks", ())
    masks = {name: _tensor(mask, device) for name, mask in zip(names, moved, strict=True)}
    return _Sample(image, masks, boxes[:, :4], boxes[:, 4].long())


def _array(tensor: Tensor) -> NDArray[Any]:
    return np.ascontiguousarray(tensor.cpu().numpy())


def _tensor(made: Any, device: torch.device) -> Tensor:
    return torch.as_tensor(np.ascontiguousarray(made) if isinstance(made, np.ndarray) else made, device=device)
