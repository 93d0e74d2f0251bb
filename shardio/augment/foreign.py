"""Finds out which generators a function of another library draws from, and whether it draws once for a whole batch.

Libraries for single images draw once per call. Called with a batch, they would crop all its images alike.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from inspect import getclosurevars
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardio.augment.boxes import Loaded

# An event of probability 1/2 that is drawn for each sample looks as if drawn once for all with 2 ** -31.
_DRAWS_COMPARED = 32
_MOST_RUNS = 16

# Generators are of the process: two threads that seed them would disturb each other.
_seeding = threading.RLock()


def of_library(function: object, *names: str) -> bool:
    """Returns whether the class of a function, or of a transform inside it, is defined in the modules `names`."""
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


def generators_of(function: object) -> list[Generator]:
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


class Generators:
    """The random generators that a function may draw from.

    These are the global generators of torch (for the CPU and for `device`), Python and NumPy, and the function's `own`.
    """

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
        """A context manager that restores the state of the generators at its end. Other threads wait to enter it."""
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
    """Returns whether two states of a generator are equal."""
    if isinstance(one, dict):
        return all(_same(part, other[name]) for name, part in one.items())
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)


class Watch:
    """Calls a function with batches of a loader. Raises ValueError if the function draws once per batch.

    If a call changes the state of a generator, the function is tested: it is called several times with a batch of equal
    images. If results differ within a batch, it draws for each image. If they differ only between calls, it draws once
    per batch. A changed state alone proves nothing, since another thread may have drawn.
    """

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        self.function = function
        self._own = generators_of(function)
        self._num_suspected = 0
        self._draws_for_each = False

    def __call__(self, batch: Loaded) -> Any:
        with batch.here():
            if self._draws_for_each or len(batch.images) < 2:
                return self.function(batch.images)
            generators = Generators(batch.images.device, self._own)
            before = generators.state()
            made = self.function(batch.images)
        if not all(map(_same, before, generators.state())):
            self._num_suspected += 1
            # A rare event may show in a later batch only. Looking less and less often costs little.
            if self._num_suspected & (self._num_suspected - 1) == 0:
                self._look_into(batch, generators)
        return made

    def _look_into(self, batch: Loaded, generators: Generators) -> None:
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
            f"transform: {name_of(self.function)} draws random numbers once for all images of a batch; use the "
            "transforms of the same names in shardio.augment, or shardio.augment.PerSample(transform), which calls "
            "the function for each image"
        )


def _alike(made: Tensor, count: int) -> bool:
    """Returns whether all `count` samples have the same results, or the samples' results cannot be told apart.

    The results of several views may follow each other or be stacked, and a sample may have several rows.
    """
    rows = []
    if made.ndim and not len(made) % count:
        rows = [made.reshape(-1, count, *made.shape[1:]).movedim(1, 0), made.reshape(count, -1)]
    if made.ndim > 4 and made.shape[1] == count:
        rows.append(made.movedim(1, 0))
    return not rows or any(torch.equal(some, some[:1].expand_as(some)) for some in rows)


def check_foreign(function: object, arrays: tuple[str, ...]) -> None:
    """Raises ValueError if a loader cannot use `function` as its transform.

    It cannot if batches have masks or boxes, named in `arrays`, or if the function is from Albumentations.
    """
    if arrays:
        raise ValueError(
            f"transform: {name_of(function)} gets only the images, so {', '.join(arrays)} would not move with them; "
            "pass a transform of shardio.augment itself, without a function around it, or PerSample(transform), or "
            "call the function in the training loop"
        )
    if of_library(function, "albumentations"):
        raise ValueError(
            f"transform: {name_of(function)} takes one image at a time; use shardio.augment.PerSample(transform), or "
            "transforms of shardio.augment"
        )


def name_of(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _tensors(made: Any) -> list[Tensor]:
    if isinstance(made, Tensor | np.ndarray):
        return [torch.as_tensor(made)]
    parts = made.values() if isinstance(made, Mapping) else made if isinstance(made, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]
