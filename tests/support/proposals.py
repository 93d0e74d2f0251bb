"""Whether each command that a DoubtError proposes does what its sentence says. Scans only: no picture is decoded.

A command may also be refused: SRC may be wrong in other ways, too. Only other data than the sentence says is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import click

from shardio.cli.main import cli
from shardio.cli.options import with_tables
from shardio.conversion.collect import collect
from shardio.conversion.options import ConvertOptions
from shardio.conversion.sources.collection import Collection, Source
from shardio.conversion.sources.doubt import DoubtError

Scanned = tuple[Path, ConvertOptions, Collection]
"""SRC and the options of a proposed command, and what it has found."""


def _sources(found: Collection) -> list[Source]:
    return [source for split in found.splits.values() for source in split]


def _are_classes(scanned: Scanned, count: int, where: str = "") -> bool:
    src, _, found = scanned
    place = src if src.as_posix().endswith(f"/{where}") else src / where
    in_archives = _noted(scanned, "the folders in ") or _noted(scanned, "the archives ")
    folders = {name for one in _sources(found) for name in os.fsdecode(one.key).split("/")[:-1]}
    folders = folders if in_archives else {entry.name for entry in os.scandir(place) if entry.is_dir()}
    return len(found.classes) == count and set(found.classes) <= folders and _has_labels(found)


def _has_labels(found: Collection) -> bool:
    return any(source.label is not None for source in _sources(found))


def _are_leaves(scanned: Scanned, count: str | None) -> bool:
    classes, sources = scanned[2].classes, _sources(scanned[2])
    leaves = (Path(os.fsdecode(one.place if isinstance(one.place, bytes) else one.key)).parent.name for one in sources)
    pairs = zip(sources, leaves, strict=True)
    are_leaves = all(isinstance(one.label, int) and classes[one.label] == leaf for one, leaf in pairs)
    return are_leaves and count in (None, str(len(classes)))


def _has_none(scanned: Scanned, where: str = "") -> bool:
    return not _has_labels(scanned[2]) and not scanned[2].classes and scanned[0].as_posix().endswith(where)


def _has_masks(scanned: Scanned, masks: str, images: str) -> bool:
    src, options, found = scanned
    named = str(options.masks).endswith(masks) and src.as_posix().endswith(images)
    return named and "mask" in {spec.name for spec in found.arrays}


def _has_masks_in_splits(scanned: Scanned, masks: str, images: str) -> bool:
    folders = {name for source in _sources(scanned[2]) for name in os.fsdecode(source.key).split("/")}
    return _has_masks(scanned, "", "") and images in folders and masks not in folders


def _ends(scanned: Scanned, ending: str) -> bool:
    return any(os.path.splitext(source.key)[0].endswith(os.fsencode(ending)) for source in _sources(scanned[2]))


def _noted(scanned: Scanned, *words: str) -> bool:
    return any(all(word in note for word in words) for note in scanned[2].notes)


MEANINGS: Sequence[tuple[str, Callable[..., bool]]] = (
    (r"folders in archives are classes", lambda it: _has_labels(it[2])),
    (
        r"these (\d+) (?:folders|(?:names of )?archives|folders in archives) are classes(?:, all files pictures)?",
        lambda it, count: _are_classes(it, int(count)),
    ),
    (r"all files are pictures, without labels", _has_none),
    (
        r"the (\d+) (?:folders|archives|folders in archives) in each split are classes",
        lambda it, count: len(it[2].classes) == int(count),
    ),
    (
        r"the (\d+) (?:folders|archives) in (.+) are classes",
        lambda it, count, where: _are_classes(it, int(count), where),
    ),
    (r"(.+) is the only class", lambda it, name: it[2].classes == (name,)),
    (r"the deepest (?:folders|archives|folders in archives) are (?:(\d+) )?classes", _are_leaves),
    (r"no image has a label", _has_none),
    (r"no image in (.+) has a label", _has_none),
    (r"all are of one split, without labels", lambda it: _has_none(it) and len(it[2].splits) == 1),
    (r"(.+) is the collection", lambda it, where: it[0].as_posix().endswith(where)),
    (r"(.+) holds the masks of (.+) in each split", _has_masks_in_splits),
    (r"(.+) holds the masks of (.+)", _has_masks),
    (r"names that end with (.+) are masks", lambda it, ending: _has_masks(it, "", "") and not _ends(it, ending)),
    (r"(.+) lists the images", lambda it, table: _noted(it, f"{table}: ")),
    (r"column '(.+)' has the labels", lambda it, name: _has_labels(it[2]) and _noted(it, "labels", name)),
    (r"column '(.+)' has the (splits|paths)", lambda it, name, what: _noted(it, what, name)),
    (r"the labels are numbers", lambda it: not it[2].classes and _has_labels(it[2])),
    (r"images without a label are left out", lambda it: all(source.label is not None for source in _sources(it[2]))),
    (
        r"the split (.+) has no labels",
        lambda it, split: _has_labels(it[2]) and all(source.label is None for source in it[2].splits[split]),
    ),
    (r"no column has the splits", lambda it: not _noted(it, "splits from")),
    (
        r"a cell may have several labels",
        lambda it: len(it[2].classes) > 1 and not any(isinstance(source.label, int) for source in _sources(it[2])),
    ),
    (r"the labels are classes(?: as written)?", lambda it: bool(it[2].classes) and _has_labels(it[2])),
    (r"all rows are of one split", lambda it: len(it[2].splits) == 1),
)
"""The sentences that a reading may have, and the function that compares the scan of its command with the sentence."""


def check(doubt: DoubtError) -> None:
    """Runs each command of the doubt, and raises AssertionError if one does not do what its sentence says."""
    for reading, command in zip(doubt.readings, doubt.commands, strict=True):
        tests = [(match, test) for words, test in MEANINGS if (match := re.fullmatch(words, reading.meaning))]
        assert tests, f"tests/support/proposals.py cannot check {reading.meaning!r}"
        assert len(reading.meaning.split()) < 10 or "/" in reading.meaning, reading.meaning
        try:
            scanned = _scan(command)
        except (ValueError, OSError, click.UsageError):  # a refusal
            continue
        match, test = tests[0]
        said = f"{reading.meaning}: {' '.join(command)}\ngave {scanned[2].classes[:9]}, {list(scanned[2].splits)}"
        assert test(scanned, *match.groups()), said


def _scan(command: Sequence[str]) -> Scanned:
    name, *words = command
    with cli.commands[name].make_context(name, list(words)) as context:
        given: dict[str, Any] = dict(context.params)
    src = given.pop("src")
    source, options = with_tables(
        src, **{name: value for name, value in given.items() if name not in ("out", "as_json")}
    )
    used = ConvertOptions(**options)
    return src, used, collect(source, used)


@contextmanager
def checked() -> Iterator[None]:
    """Checks each DoubtError that is made meanwhile, when the block ends; the refusals of its commands, too."""
    made: list[DoubtError] = []
    init = DoubtError.__init__

    def note(self: DoubtError, src: str | Path, found: str, readings: Any, args: Sequence[str] = ()) -> None:
        init(self, src, found, readings, args)
        if not args or args[0] == "convert":
            made.append(self)

    with mock.patch.object(DoubtError, "__init__", note):
        yield
        seen = set()
        while made:
            doubt = made.pop()
            if doubt.commands not in seen:
                seen.add(doubt.commands)
                check(doubt)
