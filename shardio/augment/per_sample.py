"""PerSample: calls transforms of other libraries, and functions of one image, with each image of a batch."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from inspect import getclosurevars
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardio.augment.batch import Batch
from shardio.augment.chain import Transform
from shardio.augment.checks import name_of, of_library
from shardio.augment.masks import Masks

# Generators are of the process: two threads that seed them would disturb each other.
_seeding = threading.RLock()


_Sample = tuple[Tensor, dict[str, Tensor]]
"""An image (C, H, W), and its masks by name."""


@dataclass(frozen=True, repr=False)
class PerSample(Transform):
    """Calls a function of one image with each image of a batch.

    - The function may be a transform of torchvision or Albumentations. It gets a tensor (C, H, W), or NumPy arrays if
      it is from Albumentations. All results must have one size and one dtype.
    - torchvision's v2 and Albumentations also get masks. Other functions raise ValueError if there are masks.
    - Before each call, the generators of torch, Python, NumPy and the function are seeded by (seed, epoch, sample,
      view). They are restored afterwards. No other thread should draw from these generators at the same time.
    """

    transform: Callable[..., Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.transform) or isinstance(self.transform, Transform):
            raise TypeError(
                f"transform must be a function of one image, not a transform of shardio.augment; found "
                f"{self.transform!r}"
            )

    def apply(self, batch: Batch, purpose: str) -> Batch:
        batch = batch.unsquashed().finished()
        images, masks = batch.images, batch.masks
        call = self._call_for(masks)
        generators = [*_shared_generators(images.device), *_generators_of(self.transform)]
        made: list[_Sample] = []
        with _restored(generators):
            for number, key in enumerate(batch.draws.keys(purpose).tolist()):
                seed = key % (1 << 63)
                for generator in generators:
                    _seed(generator, seed)
                if hasattr(self.transform, "set_random_seed"):  # Albumentations has generators of its own
                    self.transform.set_random_seed(seed % (1 << 32))
                own = {} if masks is None else {name: mask[number] for name, mask in masks.by_name.items()}
                image, own = call(self.transform, images[number], own)
                if not isinstance(image, Tensor) or image.ndim != 3:
                    kind = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
                    raise TypeError(
                        f"PerSample: {name_of(self.transform)} must return a tensor (C, H, W); found {kind}"
                    )
                made.append((image, own))
        pictures = self._stacked("an image", [image for image, _ in made], batch.draws.indices)
        if masks is not None:
            moved = {name: [own[name] for _, own in made] for name in masks.by_name}
            indices = batch.draws.indices
            stacked = {name: self._stacked(f"masks[{name!r}]", parts, indices) for name, parts in moved.items()}
            masks = Masks.of(pictures, stacked, masks.fills)
        return batch.holding(pictures, masks)

    def _call_for(self, masks: Masks | None) -> Callable[[Callable[..., Any], Tensor, dict[str, Tensor]], _Sample]:
        if of_library(self.transform, "albumentations"):
            return _by_albumentations
        if masks is None:
            return _alone
        if of_library(self.transform, "torchvision.transforms.v2"):
            return _by_torchvision
        raise ValueError(
            f"PerSample: {name_of(self.transform)} gets only the images, so {', '.join(masks.by_name)} would not move "
            "with them; use transforms of torchvision.transforms.v2, Albumentations or shardio.augment"
        )

    def _stacked(self, what: str, parts: list[Tensor], indices: NDArray[np.int64]) -> Tensor:
        for part, index in zip(parts, indices.tolist(), strict=True):
            if (part.shape, part.dtype) != (parts[0].shape, parts[0].dtype):
                first, found = (f"{some.dtype} {tuple(some.shape)}" for some in (parts[0], part))
                raise ValueError(
                    f"PerSample: the transform must return {what} of one shape and dtype; found {first} for sample "
                    f"{indices[0]} and {found} for sample {index}: crop or resize to one size"
                )
        return torch.stack(parts)


def _alone(transform: Callable[..., Any], image: Tensor, masks: dict[str, Tensor]) -> _Sample:
    made = transform(image)
    return made.as_subclass(Tensor) if isinstance(made, Tensor) else made, masks


def _by_torchvision(transform: Callable[..., Any], image: Tensor, masks: dict[str, Tensor]) -> _Sample:
    tv = sys.modules["torchvision.tv_tensors"]  # transforms.v2 imports it
    given = {name: tv.Mask(mask.movedim(2, 0) if mask.ndim == 3 else mask) for name, mask in masks.items()}
    made = transform({"image": tv.Image(image), "masks": given})
    moved = {name: mask.as_subclass(Tensor) for name, mask in made["masks"].items()}
    return (
        made["image"].as_subclass(Tensor),
        {name: mask.movedim(0, 2) if mask.ndim == 3 else mask for name, mask in moved.items()},
    )


def _by_albumentations(transform: Callable[..., Any], image: Tensor, masks: dict[str, Tensor]) -> _Sample:
    device, names = image.device, list(masks)
    given: dict[str, Any] = {"image": _array(image.movedim(0, 2))}
    if len(names) == 1:
        given["mask"] = _array(masks[names[0]])
    elif names:
        given["masks"] = [_array(mask) for mask in masks.values()]
    made = transform(**given)
    changed = _tensor(made["image"], device)
    if not isinstance(made["image"], Tensor):
        changed = changed[None] if changed.ndim == 2 else changed.movedim(2, 0)
    moved = [made["mask"]] if len(names) == 1 else made.get("masks", ())
    return changed, {name: _tensor(mask, device) for name, mask in zip(names, moved, strict=True)}


def _array(tensor: Tensor) -> NDArray[Any]:
    return np.ascontiguousarray(tensor.cpu().numpy())


def _tensor(made: Any, device: torch.device) -> Tensor:
    return torch.as_tensor(np.ascontiguousarray(made) if isinstance(made, np.ndarray) else made, device=device)


Generator = torch.Generator | random.Random | np.random.RandomState | np.random.Generator

# How far a function's own generators are searched for, in all that it holds, calls or names.
_DEPTH, _MOST_PARTS = 4, 1000


def _generators_of(function: object) -> list[Generator]:
    """Returns the random generators found in the attributes, the closure and the globals of a function."""
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


def _shared_generators(device: torch.device) -> list[Generator]:
    """Returns the global generators of torch (for the CPU and for `device`), Python and NumPy."""
    shared = [torch.default_generator, random.getstate.__self__, np.random.get_state.__self__]  # type: ignore[attr-defined]
    return [*shared, torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else shared


def _seed(generator: Generator, number: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(number).state
    else:
        generator.seed(number % (1 << 32))


@contextmanager
def _restored(generators: list[Generator]) -> Iterator[None]:
    """A context manager that restores the state of the generators at its end. Other threads wait to enter it."""
    with _seeding:
        before = [_state_of(generator) for generator in generators]
        try:
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                if isinstance(generator, torch.Generator):
                    generator.set_state(torch.from_numpy(state))
                elif isinstance(generator, np.random.Generator):
                    generator.bit_generator.state = state
                elif isinstance(generator, np.random.RandomState):
                    generator.set_state(state)
                else:
                    generator.setstate(state)


def _state_of(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state(legacy=False)
