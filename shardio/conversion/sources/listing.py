"""Turns the images that a scan of SRC has found (a Listing) into a Collection.

This is the one place that orders splits, numbers labels, and refuses classes without images, repeated keys and
ambiguous layouts. A scan only lists each image: its key, SRC's word for its split, its label as written, its place.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from shardio.conversion.arrays import Label
from shardio.conversion.options import EmptyClasses, Labels
from shardio.conversion.sources.collection import Collection, Fault, Item, Place, Source
from shardio.conversion.sources.doubt import UNLABELED, DoubtError, Reading
from shardio.conversion.sources.names import (
    DEFAULT_SPLIT,
    Ignored,
    Numbering,
    by_split,
    in_split_order,
    known_split,
    number_labels,
    numbers_up_to,
)
from shardio.conversion.sources.rows import Faults
from shardio.errors import SourceError, first_of
from shardio.format.layout import LABELS_NAME
from shardio.format.parse import first_repeated

KINDS_OF_FOLDERS = ("tree", "arrays")
"""The kinds of storage in which a folder may or may not be a class."""

# All rows of an index are as wide as the longest key. Names that people give are never so unequal.
_MOST_PADDING_NBYTES = 256 << 20
_MOST_PADDING = 15
"""Padding may take this many times the bytes of the keys themselves, if that is more than _MOST_PADDING_NBYTES."""

_KEY_OF_VAL = b"shardio val"
"""The key of the hash in `hold_out`, so this hash differs from the hash that orders the samples."""


class Found(NamedTuple):
    """An image, or a sample without pixels, as a scan lists it."""

    key: bytes
    label: str | Label
    """Text: a class name or an integer, still to be numbered. An int or a tuple of numbers: final. None: no label."""
    place: Place = None
    where: Any = None
    """The image's Row in a table, the path of its archive, or its group in a parquet file; otherwise None."""


@dataclass
class Listing:
    """The images that a scan has found in SRC. `collect` numbers and checks them.

    Subclasses change keys or error messages for their kind of storage.
    """

    src: str | Path
    """The beginning of error messages."""
    found: Mapping[str, Sequence[Found]]
    """The images of each split, by SRC's word for the split, such as "Validation"; by "" if SRC names no split."""
    known: Collection
    """A Collection without classes and splits, which `collect` adds."""
    classes: Sequence[str] | None = None
    """The classes in the order of their numbers. None: `collect` derives the classes from the labels."""
    class_names: Mapping[str, str] = field(default_factory=dict)
    """A readable name for each class, such as "tench" for n01440764; or empty."""
    doubts: Sequence[str] = ()
    """Descriptions of what is ambiguous in SRC. If there are any, `collect(labels=None)` raises them and `readings`."""
    readings: Sequence[Reading] = ()
    """What SRC may mean, each with the options of `convert` that say so."""
    has_class_folders: bool = False
    """Whether classes are folders or archives. Only then does `empty_classes` apply to classes without images."""
    skips_unlabeled: bool = False
    """Whether images without a label are left out and counted if others of their split have labels."""
    keeps_order: bool = False
    """Whether splits stay in the order of `found`, instead of train, val and test first."""
    may_rename: bool = False
    """Whether `collect` asks for other keys, by `key(..., again=True)`, if keys are not distinct."""

    def __post_init__(self) -> None:
        self._faults = Faults(self.src, "image")

    def key(self, split: str, one: Found, name: str, again: bool) -> bytes:
        """Returns the key of the image `one` of the class `name` (or "") in a split. `again`: whether keys were not
        distinct, so that longer ones are asked for; only with `may_rename`."""
        return one.key

    def refuse(self, one: Found, expected: str, found: object) -> Fault | None:
        """Notes an error of the image `one`, and returns None. `check` raises the noted errors, so all of SRC is
        refused. A subclass may return a Fault instead, which becomes the image's place: only it is refused then."""
        place = one.place
        where = f" (row {place.number} of {os.fsdecode(place.where)})" if isinstance(place, Item) else ""
        self._faults.add(f"{os.fsdecode(one.key)!r}{where}", expected, found)
        return None

    def lacks_label(self, one: Found) -> bool:
        return one.label is None

    def check(self) -> None:
        self._faults.check()

    def refuse_repeat(self, one: Found, first: Found) -> None:
        self.refuse(one, "each image once", "it again")

    def collect(self, labels: Labels | None = None, empty_classes: EmptyClasses = "keep") -> Collection:
        """Returns the collection, with its splits ordered, labels numbered and keys checked. If `labels` is "none",
        sources have no labels. If `labels` is None, raises DoubtError if there are `doubts`. Raises SourceError for
        invalid labels, repeated keys, and, if `empty_classes` is "refuse", classes without images."""
        if labels is None and self.doubts:
            raise DoubtError(self.src, "; ".join(self.doubts), self.readings)
        named = by_split(self.src, self.found)
        splits = {split: named[split] for split in (named if self.keeps_order else in_split_order(named))}
        if empty := [split or DEFAULT_SPLIT for split, some in splits.items() if not some]:
            raise SourceError(
                f"{self.src}: expected images in the split {empty[0]!r}, found none: add some, or remove the split"
            )
        if not splits:
            self.check()
            raise SourceError(f"{self.src}: expected images, found none")
        unlabeled = labels == "none"
        ignored = self.known.ignored.copy()
        if not unlabeled:
            splits = {split: self._labeled(split, some, ignored) for split, some in splits.items()}
        numbering = self._number(splits, "keep" if unlabeled else empty_classes)
        for again in (False, True):
            sources = {
                split or DEFAULT_SPLIT: tuple(self._sources(split, some, numbering, unlabeled, again))
                for split, some in splits.items()
            }
            repeated = first_repeated(source.key for source in chain.from_iterable(sources.values()))
            if repeated is None or not self.may_rename:
                break
        if repeated is not None:
            first_of_key: dict[bytes, Found] = {}
            for source, one in zip(chain(*sources.values()), chain(*splits.values()), strict=True):
                if (other := first_of_key.setdefault(source.key, one)) is not one:
                    self.refuse_repeat(one, other)
        self.check()
        places = [source.place for source in chain.from_iterable(sources.values())]
        if isinstance(first := places[0], Fault) and all(isinstance(place, Fault) for place in places):
            raise SourceError(
                f"{self.src}: none of the {len(places):,} images can be used; the first image: {first.detail}"
            )
        self._check_keys(sources)
        if labels is None and self.known.kind not in KINDS_OF_FOLDERS:
            self._check_words(numbering.classes)
        classes = () if unlabeled else numbering.classes
        return replace(
            self.known,
            classes=classes,
            splits=sources,
            ignored=ignored,
            class_names=tuple(self.class_names[name] for name in classes if self.class_names),
            arrays=tuple(spec for spec in self.known.arrays if not (unlabeled and spec.name == LABELS_NAME)),
        )

    def _labeled(self, split: str, some: Sequence[Found], ignored: Ignored) -> Sequence[Found]:
        """Returns the images of a split that have a label, or all images if none has a label. If only some have one:
        counts the others in `ignored` if `skips_unlabeled` is true, otherwise raises DoubtError."""
        lacking = [one.key for one in some if self.lacks_label(one)]
        if not lacking or all(one.label is None for one in some):
            return some
        if not self.skips_unlabeled:
            self.check()
            found = f"found none for {len(lacking):,} of {len(some):,}, such as {os.fsdecode(lacking[0])!r}"
            skip = Reading("images without a label are left out", {"--unlabeled": "skip"})
            expected = f"expected a label for every image of {split or DEFAULT_SPLIT!r}, or for none"
            raise DoubtError(self.src, f"{expected}, {found}", [skip, UNLABELED])
        ignored.leave_out("image without a label", lacking)
        return [one for one in some if not self.lacks_label(one)]

    def _number(self, splits: Mapping[str, Sequence[Found]], empty_classes: EmptyClasses) -> Numbering:
        everything = [one.label for one in chain.from_iterable(splits.values())] if self.classes is None else []
        if integers := [label for label in everything if isinstance(label, int)]:
            return Numbering(numbers_up_to(min(integers), max(integers)), {})
        if self.classes is None:
            return number_labels(
                {(split, one.label) for split, some in splits.items() for one in some if isinstance(one.label, str)}
            )
        classes, unknown = tuple(self.classes), "a known class"
        if self.has_class_folders and empty_classes != "keep":
            labeled = ({one.label for one in some} for some in splits.values() if some[0].label is not None)
            used = next(labeled, set())
            if (empty := [name for name in classes if name not in used]) and empty_classes == "refuse":
                raise SourceError(
                    f"{self.src}: expected images in every class folder, found {len(empty):,} without images: "
                    f"{first_of(empty, 5, repr)}. Add images, or pass `--empty-classes omit` (only classes with images "
                    "get a number) or `--empty-classes keep` (all classes get a number)"
                )
            classes, unknown = (
                tuple(name for name in classes if name in used),
                "a class that has images in the first split (or pass `--empty-classes keep`)",
            )
        return Numbering(classes, {name: label for label, name in enumerate(classes)}, unknown=unknown)

    def _sources(
        self, split: str, some: Sequence[Found], numbering: Numbering, unlabeled: bool, again: bool
    ) -> Iterator[Source]:
        has_labels = not unlabeled and any(one.label is not None for one in some)
        for one in some:
            label, name, wrong = one.label, "", ""
            if isinstance(label, str):
                number = numbering.labels.get(label)
                if number is None:
                    wrong = numbering.expected.get((split, label), numbering.unknown)
                else:
                    name = numbering.classes[number]
                label = number or 0
            elif label is None and has_labels:
                label = 0  # of a sample that is refused
            fault = self.refuse(one, wrong, one.label) if wrong and has_labels else None
            yield Source(self.key(split, one, name, again), label if has_labels else None, fault or one.place)

    def _check_keys(self, sources: Mapping[str, Sequence[Source]]) -> None:
        for split, some in sources.items():
            longest = max((source.key for source in some), key=len)
            total, padded = sum(len(source.key) for source in some), len(longest) * len(some)
            if padded - total > max(_MOST_PADDING_NBYTES, _MOST_PADDING * total):
                raise SourceError(
                    f"{self.src}: in the split {split!r}, the path {os.fsdecode(longest)[:80]!r}... has "
                    f"{len(longest):,} bytes. Padding all paths to its length would make an index of {padded:,} bytes: "
                    "move the image to a shorter path"
                )

    def _check_words(self, classes: Sequence[str]) -> None:
        words = [name for name in classes if known_split(name)]
        # One class may have such a name: many collections have trains.
        if len(words) == len(classes) > 0 or len(set(map(known_split, words))) > 1:
            found = f"expected names of classes, found names of splits ({', '.join(map(repr, words))})"
            raise DoubtError(self.src, f"{found}, which would become classes", [UNLABELED])


def hold_out(src: object, collection: Collection, share: float | None) -> Collection:
    """Returns the collection with about `share` (0 to 1) of its only split, train, moved into the split val, or
    unchanged for None. A hash of the source's group decides (or of its key, without groups). Errors begin with
    `src`."""
    if share is None and collection.groups:
        raise ValueError("`group_column` is only for `val`, which is missing: pass `val`, or leave `group_column` out")
    if share is None:
        return collection
    if list(collection.splits) != [DEFAULT_SPLIT]:
        found = ", ".join(map(repr, collection.splits))
        raise SourceError(f"{src}: `--val` divides the split {DEFAULT_SPLIT!r} alone, found {found}: leave `--val` out")
    sides: dict[str, list[Source]] = {DEFAULT_SPLIT: [], "val": []}
    for source in collection.splits[DEFAULT_SPLIT]:
        name = os.fsencode(collection.groups[source.key]) if collection.groups else source.key
        number = hashlib.blake2b(name, digest_size=8, key=_KEY_OF_VAL).digest()
        sides["val" if int.from_bytes(number, "big") < share * (1 << 64) else DEFAULT_SPLIT].append(source)
    if empty := [split for split, some in sides.items() if not some]:
        raise SourceError(
            f"{src}: `--val` leaves none of the {collection.num_sources:,} images to {empty[0]!r}: choose another share"
        )
    notes = collection.notes
    if collection.groups:
        of_val, of_train = ({collection.groups[one.key] for one in sides[split]} for split in ("val", DEFAULT_SPLIT))
        total = len(of_val) + len(of_train)
        notes = (*notes, f"{len(of_val):,} of {total:,} groups are in val, and no group is in both splits")
    splits = {split: tuple(some) for split, some in sides.items()}
    return replace(collection, splits=splits, notes=notes, is_held_out=True)
