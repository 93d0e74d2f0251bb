"""PerSample, which calls a transform of another library, or a function of one image, with each image of a batch."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
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
from shardio.augment.boxes import CURRENT
from shardio.augment.chain import Transform
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
                f"transform must be a function of one image, and no transform of shardio.augment; found "
                f"{self.transform!r}"
            )

    def apply(self, batch: Batch, purpose: str) -> Batch:
        batch = batch.unsquashed().finished()
        images, masks = batch.images, batch.masks
        call = self._call_for(masks)
        generators = [*_shared_generators(images.device), *_generators_of(self.transform)]
        stacks: dict[str | None, Tensor] = {}
        indices = batch.draws.counters.tolist()
        with _restored(generators):
            for number, key in enumerate(batch.draws.keys(purpose).tolist()):
                seed = key % (1 << 63)
                for generator in generators:
                    _seed(generator, seed)
                if hasattr(self.transform, "set_random_seed"):  # Albumentations has generators of its own
                    self.transform.set_random_seed(seed % (1 << 32))
                # Copies, as the function may work in place.
                own = {} if masks is None else {name: mask[number].clone() for name, mask in masks.by_name.items()}
                image, own = call(self.transform, images[number].clone(), own)
                if not isinstance(image, Tensor) or image.ndim != 3:
                    kind = f"shape {tuple(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
                    raise TypeError(
                        f"PerSample: {name_of(self.transform)} must return a tensor (C, H, W); found {kind}"
                    )
                _stack(stacks, None, image, number, indices)
                for name in () if masks is None else masks.by_name:
                    _stack(stacks, name, own[name], number, indices)
        pictures = stacks.pop(None)
        return batch.holding(pictures, None if masks is None else Masks.of(pictures, stacks, masks.fills))

    def _call_for(self, masks: Masks | None) -> Callable[[Callable[..., Any], Tensor, dict[str, Tensor]], _Sample]:
        if _has(self.transform, "albumentations"):
            return _by_albumentations
        if masks is None:
            return _alone
        if _has(self.transform, "torchvision.transforms.v2"):
            return _by_torchvision
        raise ValueError(
            f"PerSample: {name_of(self.transform)} gets images only, so the masks {', '.join(masks.by_name)} would not "
            "move with the images; use transforms of torchvision.transforms.v2, Albumentations or shardio.augment"
        )


def _stack(stacks: dict[str | None, Tensor], name: str | None, part: Tensor, number: int, indices: list[int]) -> None:
    """Copies `part`, the image (None) or mask `name` of sample `number`, at once: a function may reuse its memory."""
    if name not in stacks:
        stacks[name] = part.new_empty((len(indices), *part.shape))
    whole = stacks[name]
    if (part.shape, part.dtype) != (whole.shape[1:], whole.dtype):
        first, found = (f"{some.dtype} {tuple(some.shape)}" for some in (whole[0], part))
        what = "images" if name is None else f"masks[{name!r}]"
        raise ValueError(
            f"PerSample: the transform must return {what} of one shape and dtype; found {first} for sample "
            f"{indices[0]} and {found} for sample {indices[number]}: crop or resize to one size"
        )
    whole[number].copy_(part)


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
    """Returns the random generators found in a function's attributes, closure and globals, and in objects they hold."""
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
    """Returns a context manager that restores the generators' state at its end. Only one thread may be inside."""
    with _seeding, ExitStack() as stack:
        # Transforms that the function calls draw from these generators, too.
        stack.callback(CURRENT.reset, CURRENT.set(None))
        for generator in generators:
            if isinstance(generator, torch.Generator):
                stack.callback(generator.set_state, generator.get_state())
            elif isinstance(generator, np.random.Generator):
                stack.callback(setattr, generator.bit_generator, "state", generator.bit_generator.state)
            elif isinstance(generator, random.Random):
                stack.callback(generator.setstate, generator.getstate())
            else:
                stack.callback(generator.set_state, generator.get_state(legacy=False))
        yield


# --- transforms that would draw once for a batch ---------------------------------------------------------------------

# torchvision and Albumentations draw once per call. Called with a batch, they would crop all its images at the same
# place. Kornia draws for each image, except with same_on_batch.

# The classes of torchvision that draw, besides the classes whose names begin with "Random".
_DRAWING = {
    "AugMix",
    "AutoAugment",
    "ColorJitter",
    "CutMix",
    "ElasticTransform",
    "GaussianBlur",
    "JPEG",
    "MixUp",
    "RandAugment",
    "ScaleJitter",
    "TrivialAugmentWide",
}
# Containers pass the whole batch to the transforms inside. A module of the user may call them for each image.
_CONTAINERS = ("torch.nn.modules.container", "torch._dynamo", "torchvision.transforms", "kornia")


def check_foreign(function: object) -> None:
    """Raises ValueError if `function`, or a transform inside it, would draw once for all images of a batch.

    Checks classes of torchvision, Albumentations and Kornia. All other functions pass.
    """
    drawing = [kind.__name__ for kind in type(function).__mro__ if _is_in(kind, "torchvision.transforms")]
    problem = ""
    if _is_of(function, "albumentations"):
        problem = "takes one image at a time"
    elif any(name in _DRAWING or name.startswith("Random") for name in drawing):
        problem = "draws random numbers once for all images of a batch"
    elif _is_of(function, "kornia") and getattr(function, "same_on_batch", None):
        problem = "draws once for all images of a batch: leave out same_on_batch=True"
    if problem:
        raise ValueError(
            f"transform: {type(function).__name__} {problem}; use transforms of shardio.augment, or "
            "shardio.augment.PerSample(transform), which calls a transform for each image"
        )
    if _is_of(function, *_CONTAINERS):
        for part in _parts_of(function):
            check_foreign(part)


def _has(function: object, name: str) -> bool:
    """Returns whether the class of a function, or of a transform inside it, is defined in the module `name`."""
    return _is_of(function, name) or any(_has(part, name) for part in _parts_of(function))


def name_of(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _is_of(function: object, *names: str) -> bool:
    return any(_is_in(kind, name) for kind in type(function).__mro__ for name in names)


def _is_in(kind: type, name: str) -> bool:
    return f"{kind.__module__}.".startswith(f"{name}.")


def _parts_of(function: object) -> list[object]:
    parts: list[object] = list(function.children()) if isinstance(function, torch.nn.Module) else []
    several = getattr(function, "transforms", ())
    return [*parts, *several] if isinstance(several, list | tuple) else parts
