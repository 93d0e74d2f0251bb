"""`merge` joins the samples of several sets in a new set, which shares the shards of the old sets."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from shardio.changes.carry import CarryOptions, ChangeReport, Room, carry_out, check_target, open_parent
from shardio.changes.draft import Draft, SplitDraft, check_vectors, concatenated
from shardio.errors import ConvertError, check_choice
from shardio.format.layout import HEADER_NBYTES, LABELS_NAME, MAX_CLASSES, index_dtype, pixels_row
from shardio.sets.given import show_key, some_keys
from shardio.sets.storage import FolderStorage

SameKeys = Literal["refuse", "allow"]
SameImages = Literal["refuse", "keep"]

_MOST_COMPARED = 1000
"""Maximum number of pairs of equal samples to find: one pair is enough to refuse a merge."""


def _plan(drafts: Sequence[Draft], names: Sequence[str], *, only_common: bool, same_keys: bool) -> Draft:
    """Returns the draft of the merged set, or raises ConvertError: see `merge`. Errors call the sets by `names`."""
    first = drafts[0]
    for draft, name in zip(drafts, names, strict=True):
        if draft.pixels != first.pixels:
            raise ConvertError(
                f"{name}: expected samples stored as {first.pixels}, as in {names[0]}, found samples stored as "
                f"{draft.pixels}: convert one of the two sets again, with `--pixels {first.pixels}` or `--pixels "
                f"{draft.pixels}`"
            )
        if draft.sample_shape != first.sample_shape:
            raise ConvertError(
                f"{name}: expected samples of {first.sample_shape or 'no pixels'}, as in {names[0]}, found samples of "
                f"{draft.sample_shape or 'no pixels'}: convert one of the two sets again, with the size of the other"
            )
    drafts = _with_one_list_of_classes(drafts, names)
    splits: dict[str, SplitDraft] = {}
    for name in dict.fromkeys(name for draft in drafts for name in draft.splits):
        having = [
            (draft.splits[name], where) for draft, where in zip(drafts, names, strict=True) if name in draft.splits
        ]
        splits[name] = _merge_split(name, having, only_common, same_keys)
    return replace(drafts[0], splits=splits, rejects=tuple(old for draft in drafts for old in draft.rejects))


def _with_one_list_of_classes(drafts: Sequence[Draft], names: Sequence[str]) -> list[Draft]:
    """Returns the drafts, each with the classes of all sets in order of first appearance."""
    if not any(draft.classes for draft in drafts):
        return list(drafts)
    for draft, name in zip(drafts, names, strict=True):
        if not draft.classes:
            raise ConvertError(
                f"{name}: this set has no class names, but another set has: convert one again, so both or none have"
            )
    classes = list(dict.fromkeys(name for draft in drafts for name in draft.classes))
    if len(classes) > MAX_CLASSES:
        raise ConvertError(f"expected at most {MAX_CLASSES:,} classes, found {len(classes):,} classes in all sets")
    called: dict[str, str] = {}
    for draft, where in zip(drafts, names, strict=True):
        for name, other in zip(draft.classes, draft.class_names, strict=False):
            first = called.setdefault(name, other)
            # A name that is no number, such as a wnid, means one thing: the readable name in the first set is taken.
            if name.isdecimal() and other != first and name not in (other, first):
                raise ConvertError(
                    f"{where}: expected {first!r} as the readable name of the class {name!r}, as before, found "
                    f"{other!r}: make one of the sets again, with names of classes that are no numbers"
                )
    class_names = tuple(called.get(name, name) for name in classes) if called else ()
    return [replace(draft.with_classes(classes), class_names=class_names) for draft in drafts]


def _merge_split(
    split: str, having: Sequence[tuple[SplitDraft, str]], only_common: bool, same_keys: bool
) -> SplitDraft:
    parts = [part for part, _ in having]
    if len(parts) == 1:
        return parts[0]
    if len({part.labels is None for part in parts}) > 1:
        without = ", ".join(name for part, name in having if part.labels is None)
        raise ConvertError(
            f"split {split!r}: expected integer labels in all sets or in none, found none in {without}: "
            "`shardio change --labels` adds labels to a set"
        )
    if len({part.squashed for part in parts}) > 1:
        squashed = ", ".join(name for part, name in having if part.squashed)
        raise ConvertError(
            f"split {split!r}: only the images of {squashed} were squashed, which means resized without keeping their "
            "aspect ratios: convert sets again, all with `--fit squash` or all without"
        )
    width = max(part.rows.dtype["key"].itemsize for part in parts)
    dtype = index_dtype(width, has_label=parts[0].labels is not None)
    rows = np.concatenate([part.rows[[*(dtype.names or ())]] for part in parts], dtype=dtype)
    arrays = _common(split, having, only_common)
    if not parts[0].pixels.shards and not {*arrays} - {LABELS_NAME}:
        raise ConvertError(
            f"split {split!r}: expected an array that is the same in {', '.join(name for _, name in having)}, as the "
            "sets have no pixels, found none: add one by `shardio change --array`"
        )
    if not same_keys:
        keys, counts = np.unique(rows["key"], return_counts=True)
        if (twice := keys[counts > 1]).size:
            raise ConvertError(
                f"split {split!r}: {twice.size:,} keys occur more than once: {some_keys(twice.tolist())}. Drop "
                "samples by `shardio change --drop --list`, or keep all by `--same-keys allow`, from Python "
                '`same_keys="allow"`'
            )
    return replace(
        parts[0],
        rows=rows,
        index=None,
        pixels=concatenated([part.pixels for part in parts]),
        arrays={
            name: replace(parts[0].arrays[name], stored=concatenated([part.arrays[name].stored for part in parts]))
            for name in arrays
        },
    )


def _common(split: str, having: Sequence[tuple[SplitDraft, str]], only_common: bool) -> list[str]:
    """Returns the names of the arrays that the split has in all sets, with the same type. Unless `only_common` is true,
    raises ConvertError if a set has other arrays. `having` are (draft of the split, name of the set)."""
    types = [
        {name: f"{name} ({one.kind} of {one.row.dtype} {one.row.shape})" for name, one in part.arrays.items()}
        for part, _ in having
    ]
    first = types[0]
    for other, (_, place) in zip(types, having, strict=True):
        if not only_common and other != first:
            found, others = (", ".join(each.values()) or "none" for each in (first, other))
            raise ConvertError(
                f"split {split!r}: expected the same arrays in all sets, found {found} in {having[0][1]}, and {others} "
                f"in {place}: `--only-common`, from Python `only_common=True`, leaves out arrays that differ"
            )
    return [name for name, kind in first.items() if all(other.get(name) == kind for other in types)]


def _check_same_images(drafts: Sequence[Draft], names: Sequence[str]) -> None:
    """Raises ConvertError if samples of two sets have the same pixels. Errors call the sets by `names`."""
    if (sample_shape := drafts[0].sample_shape) is None:
        return
    splits = [(source, split) for source, draft in enumerate(drafts) for split in draft.splits.values()]
    nbytes = pixels_row(sample_shape, drafts[0].pixels).nbytes
    pairs = sorted(islice(_equal_samples(splits, nbytes), _MOST_COMPARED))
    if not pairs:
        return
    found = [[(splits[place][1].rows["key"][sample], splits[place][0]) for place, sample in pair] for pair in pairs]
    first = " equals ".join(f"{show_key(key)} of {names[source]}" for key, source in found[0])
    rest = [key for (key, _), _ in found[1:]]
    more = " or more" if len(pairs) == _MOST_COMPARED else ""
    raise ConvertError(
        f"{len(pairs):,} images{more} are in two of the sets: {first}"
        f"{'; more such images: ' if rest else ''}{some_keys(rest)}. "
        "Drop them from one set by `shardio change --drop --list`, or keep both by `--same-images keep`, from "
        'Python `same_images="keep"`'
    )


def _equal_samples(
    splits: Sequence[tuple[int, SplitDraft]], nbytes: int
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yields pairs of samples with the same pixels, of `nbytes` bytes: (a sample, a sample of an earlier set).

    `splits` are (number of the set, split), and a sample is (its place in `splits`, its number in the split). Reads the
    pixels only of samples with the same checksum.
    """
    crc32s = np.concatenate([split.rows["crc32"] for _, split in splits])
    order = np.argsort(crc32s, kind="stable")
    firsts = np.ones(len(order) + 1, np.bool_)
    firsts[1:-1] = crc32s[order[1:]] != crc32s[order[:-1]]
    bounds = np.flatnonzero(firsts)
    lengths = [len(split) for _, split in splits]
    places = np.repeat(np.arange(len(splits)), lengths)[order]
    samples = order - np.cumsum([0, *lengths])[places]
    sources = np.array([source for source, _ in splits])[places]
    in_several = sources[bounds[:-1]] != sources[bounds[1:] - 1]
    storages: dict[Path, FolderStorage] = {}
    for start, stop in zip(bounds[:-1][in_several].tolist(), bounds[1:][in_several].tolist(), strict=True):
        seen: dict[bytes, tuple[int, int]] = {}
        for place, sample in zip(places[start:stop].tolist(), samples[start:stop].tolist(), strict=True):
            shard, row = splits[place][1].pixels.locate(sample)
            storage = storages.setdefault(shard.folder, FolderStorage(shard.folder))
            pixels = memoryview(bytearray(nbytes))
            storage.read_into(shard.entry, HEADER_NBYTES + row * nbytes, pixels)
            first = seen.setdefault(hashlib.sha256(pixels).digest(), (place, sample))
            if splits[first[0]][0] != splits[place][0]:
                yield (place, sample), first


def merge(
    sets: Sequence[str | os.PathLike[str]],
    new: str | os.PathLike[str],
    *,
    only_common: bool = False,
    same_keys: SameKeys = "refuse",
    same_images: SameImages = "refuse",
    copy: bool = False,
    on_room: Callable[[Room], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ChangeReport:
    """Makes a new set in the folder `new` from all samples of `sets`, and returns a report.

    Samples must have the same shape. Splits with the same name become one split: samples of the first set come first.
    Classes are matched by name, and labels are renumbered in order of first appearance. `only_common` leaves out
    arrays that a set lacks, or has with another type. Raises ConvertError for samples of a split with the same key
    unless `same_keys` is "allow", and for samples of two sets with the same pixels unless `same_images` is "keep".
    `CarryOptions` documents `copy`, `on_room` and `on_progress`; `carry_out` documents the other errors.
    """
    if isinstance(sets, (str, os.PathLike)) or not sets:
        raise ValueError(
            "sets must be a list of at least one set, followed by the folder of the new set as the next argument"
        )
    check_choice("same_keys", same_keys, SameKeys)
    check_choice("same_images", same_images, SameImages)
    parents = [open_parent(one) for one in sets]
    target = check_target(new, parents)
    drafts, names = [parent.draft for parent in parents], [str(parent.folder) for parent in parents]
    draft = _plan(drafts, names, only_common=only_common, same_keys=same_keys == "allow")
    for one, name in zip(drafts, names, strict=True):
        check_vectors(one, draft, name)
    if same_images == "refuse":
        _check_same_images(drafts, names)
    arguments = {"only_common": only_common, "same_keys": same_keys, "same_images": same_images}
    had = ((name, array) for one in drafts for name, split in one.splits.items() for array in split.arrays)
    left_out = dict.fromkeys(f"{name}/{array}" for name, array in had if array not in draft.splits[name].arrays)
    options = CarryOptions(copy, on_room, on_progress)
    return carry_out(draft, target, "merge", arguments, parents, options, {"left_out": list(left_out)})
