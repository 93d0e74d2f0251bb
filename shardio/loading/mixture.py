"""Mixtures: several sets that a loader reads together, each with its share of the samples."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardio.cache.cached_split import open_source
from shardio.cache.meeting import Meeting
from shardio.errors import check_choice
from shardio.format.layout import LABEL_ROW
from shardio.order.mixture import Component, MixedOrder, Number, lowest_terms
from shardio.order.orders import Shuffle, make_order
from shardio.order.permutation import VERSION
from shardio.order.rng import make_keys
from shardio.reading.mixed import MixedSet, MixedSource
from shardio.reading.shardset import ShardSet

Classes = Literal["same", "join", "stored"]


@dataclass(frozen=True, eq=False)
class Part:
    """One set of a mixture, and its share of the samples.

    path: the set: a folder, or a URL if the loader has a `cache`.
    share: a number of at least 0, relative to the shares of the other sets. With 0, the set pauses and keeps its place.
    split: the split to read; by default the loader's split.
    digest: the digest that the set must have, as for ShardLoader.
    indices: the samples to read instead of all.
    """

    path: str | os.PathLike[str]
    share: Number = 1
    split: str | None = None
    digest: str | None = None
    indices: ArrayLike | None = None


@dataclass(frozen=True)
class Mixture:
    """Sets to read together. `Mixture({"photos/": 3, "drawn/": 1})` reads three photos for each drawing.

    parts: a dict from path to share, or a list of `Part`. ShardLoader takes either in place of a Mixture.
    classes: "same" requires the same classes in all sets. "join" numbers the classes of all sets by name, as
        `shardio merge` does. "stored" keeps labels as they are stored, whatever they mean in each set.
    """

    parts: Mapping[str, Number] | Sequence[Part]
    classes: Classes = "same"

    def __post_init__(self) -> None:
        check_choice("classes", self.classes, Classes)
        parts = self.parts
        if isinstance(parts, Mapping):
            parts = [Part(path, share) for path, share in parts.items()]
        if not isinstance(parts, Iterable) or not (found := list(parts)) or not all(isinstance(p, Part) for p in found):
            raise ValueError(
                "expected a path to one set, or for a mixture a dict from path to share, or a list of Part; found "
                f"{self.parts!r:.200}"
            )
        object.__setattr__(self, "parts", tuple(found))


Sets: TypeAlias = str | os.PathLike[str] | Mapping[str, Number] | Sequence[Part] | Mixture
"""The first argument of ShardLoader: one set, or a mixture."""


def open_mixture(
    mixture: Mixture,
    split: str,
    cache: str | os.PathLike[str] | None,
    meet: Callable[[], Meeting | None],
    shuffle: Shuffle,
    seed: int,
) -> tuple[MixedSource, MixedOrder]:
    """Returns the source and the order of a mixture. `split` is for parts that name no split; for `cache` and `meet`
    see `open_source`. Raises ValueError for invalid shares, or if two parts have the same samples."""
    parts = [part for part in mixture.parts if isinstance(part, Part)]  # which they all are
    shares = lowest_terms([part.share for part in parts])
    with contextlib.ExitStack() as stack:
        sources, components, start = [], [], 0
        for part in parts:
            source = open_source(part.path, part.split or split, cache, part.digest, meet)
            stack.callback(source.close)
            sources.append(source)
            # Keyed by what the set is, so that sets of one size differ, and each keeps its order beside any others.
            plain = make_order(source.num_samples, indices=part.indices, shuffle=shuffle, seed=seed)
            identity = {"digest": source.digest, "split": part.split or split, **plain.describe()}
            name = f"shardio part {VERSION} {identity['digest']} {identity['split']} {identity.get('indices', '')}"
            (own,) = make_keys(name.encode(), seed, 0, 1)
            order = make_order(source.num_samples, indices=part.indices, shuffle=shuffle, seed=int(own))
            components.append(Component(identity, order, start))
            start += source.num_samples
        for number, one in enumerate(components):
            if one.identity in [other.identity for other in components[:number]]:
                raise ValueError(
                    f"{parts[number].path}: expected each set once in a mixture, found the same samples twice: "
                    "make one part of them, with the sum of their shares"
                )
        mixed = MixedSource(sources, partial(_join, classes=mixture.classes))
        stack.pop_all()
    # In an order of their own: that of the arguments does not matter to the stream.
    ranks = sorted(range(len(parts)), key=lambda number: json.dumps(components[number].identity, sort_keys=True))
    in_order = tuple(components[number] for number in ranks)
    return mixed, MixedOrder(in_order, seed, tuple(shares[number] for number in ranks))


def _join(sets: Sequence[ShardSet], classes: Classes) -> MixedSet:
    """Returns the opened sets as a MixedSet. Raises ValueError if samples of the sets cannot be in one batch."""
    first = sets[0]
    for one in sets[1:]:
        for what, mine, theirs in (
            ("image shape", first.manifest.sample_shape, one.manifest.sample_shape),
            ("label type", first.label_row, one.label_row),
        ):
            if mine != theirs:
                raise ValueError(
                    f"{one.path}, {one.split}: expected the {what} of {first.path}, {first.split}, {mine or 'none'}; "
                    f"found {theirs or 'none'}: mix only sets whose images and labels have one shape and type"
                )
        if classes == "same" and one.classes != first.classes:
            raise ValueError(
                f"{one.path}: expected the classes of {first.path}, found others: use Mixture(..., "
                'classes="join") to join classes by name, or classes="stored" to keep labels as they are stored'
            )
    if classes == "join" and first.label_row != LABEL_ROW:
        raise ValueError(
            f'{first.path}: classes="join" needs class numbers, found {first.label_row or "none"}: use classes="stored"'
        )
    if classes != "join":
        same = all(one.classes == first.classes for one in sets)
        return MixedSet(sets, first.classes if same else (), first.class_names if same else (), [None] * len(sets))
    for one in sets:
        if not one.classes:
            raise ValueError(f'{one.path}: classes="join" needs class names; this set has none: use classes="stored"')
    number = {name: i for i, name in enumerate(dict.fromkeys(name for one in sets for name in one.classes))}
    # The first set that has a class names it.
    called = {name: people for one in reversed(sets) for name, people in zip(one.classes, one.class_names, strict=True)}
    relabel: list[NDArray[np.int64] | None] = [np.array([number[name] for name in one.classes]) for one in sets]
    return MixedSet(sets, tuple(number), tuple(called[name] for name in number), relabel)
