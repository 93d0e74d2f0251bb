"""WebDataset tars: members that share a name up to its first dot are a sample, an image and its label.

Keys are those that the images would have in a folder tree: [SPLIT/]CLASS/NAME. So samples made of such a tree, whether
or not their names still have its folders, give the set that the tree gives.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import NamedTuple

from shardio.conversion.sources.clutter import clutter_in, entries
from shardio.conversion.sources.collection import Collection, Extent, Fault, FileOrigin, Source
from shardio.conversion.sources.labels import NO_VECTORS, Numbering, number_labels
from shardio.conversion.sources.splits import (
    DEFAULT_SPLIT,
    SPLIT_NAMES,
    in_split_order,
    known_split,
    split_name,
    two_words,
)
from shardio.conversion.sources.tar import drain, members, open_archive
from shardio.errors import SourceError
from shardio.format.parse import first_repeated

_IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
# Fields of a .json member: the first that is there counts.
_LABEL_FIELDS = ("label", "class", "cls")
_MAX_LABEL_NBYTES = 1 << 20

_MAGIC = re.compile(r"[{*?[]")
_MOST_TARS = 1_000_000


class _Sample(NamedTuple):
    tar: str
    name: str
    """The name of the image; without a suffix if there is none."""
    place: Extent | Fault
    label: str
    """As written; empty if there is none."""


def scan_webdataset(src: Path) -> Collection:
    """Lists the samples of a tar, of the tars at or below a folder, or of a pattern: train-{000..146}.tar, *.tar.

    Images are jpg, jpeg, png or webp. Labels are the content of a .cls, or "label", "class" or "cls" in a .json: all
    integers, or all names of classes. The split is told by the folders or names of all tars, or by the first folder in
    all names of samples; otherwise it is train. The order is that of the tars. A sample without a label or image is a
    source that will be refused. SourceError says what is wrong with the tars.
    """
    folder, tars, ignored = _find_tars(src)
    samples: list[_Sample] = []
    for found in drain(_walk(folder, tar) for tar in tars):
        samples += (item for item in found if isinstance(item, _Sample))
        ignored.update(item for item in found if isinstance(item, str))
    faults = [sample.place for sample in samples if isinstance(sample.place, Fault)]
    if len(faults) == len(samples):
        found_instead = f"none in {len(samples):,}: {faults[0].detail}" if samples else "no sample"
        raise SourceError(
            f"{src}: expected samples of an image and a label (.cls or .json), found {found_instead}. (The tar of a "
            "folder tree must be unpacked; ImageNet's own archives need `--source ilsvrc`)"
        )
    splits = _splits(src, tars, samples)
    written: dict[str, set[str]] = {split: set() for split in in_split_order(splits)}
    for sample, split in zip(samples, splits, strict=True):
        if not isinstance(sample.place, Fault):
            written[split].add(sample.label)
    numbering = number_labels(written)
    sources = _sources(samples, splits, numbering, keep_tar=False)
    if first_repeated(_keys(sources)) is not None:  # names that begin anew in each tar
        sources = _sources(samples, splits, numbering, keep_tar=True)
        if (key := first_repeated(_keys(sources))) is not None:
            raise SourceError(f"{src}: expected samples of different names in a tar, found {os.fsdecode(key)!r} twice")
    faults = [source.place for source in chain.from_iterable(sources.values()) if isinstance(source.place, Fault)]
    if len(faults) == len(samples):
        raise SourceError(f"{src}: expected samples with a label, found none in {len(samples):,}: {faults[0].detail}")
    by_split = {split or DEFAULT_SPLIT: tuple(sources[split]) for split in written}
    return Collection(FileOrigin(folder), numbering.classes, by_split, ignored, kind="webdataset")


# --- tars -------------------------------------------------------------------------------------------------------------


def is_pattern(src: Path) -> bool:
    """Whether `src` may stand for many files, and is none itself."""
    return _MAGIC.search(str(src)) is not None and not os.path.lexists(src)


def _find_tars(src: Path) -> tuple[Path, list[str], Counter[str]]:
    """Returns (a folder, the paths of all tars relative to it, counts of what else is there)."""
    ignored: Counter[str] = Counter()
    if is_pattern(src):
        fixed = _MAGIC.split(str(src), maxsplit=1)[0]
        folder = Path(os.path.dirname(fixed))
        return folder, [os.path.relpath(path, folder) for path in _expand(str(src))], ignored
    if not src.is_dir():
        return src.parent, [src.name], ignored
    tars = []
    for entry in _sorted_entries(src, ignored):
        for one in _sorted_entries(src / entry.name, ignored) if entry.is_dir() else [entry]:
            if one.name.endswith(".tar"):
                tars.append(os.path.relpath(one.path, src))
            else:
                ignored["other file"] += 1
    if not tars:
        raise SourceError(f"{src}: expected tars in it or in its folders, found none")
    return src, tars, ignored


def _sorted_entries(folder: Path, ignored: Counter[str]) -> list[os.DirEntry[str]]:
    return sorted(entries(folder, ignored), key=lambda entry: entry.name)


def _expand(pattern: str) -> list[str]:
    """Returns the files that a pattern names, in its order: braces as in a shell, then *, ? and []."""
    paths: dict[str, None] = {}
    missing = []
    names = list(islice(_expand_braces(pattern), _MOST_TARS + 1))
    if len(names) > _MOST_TARS:
        raise SourceError(f"{pattern}: expected at most {_MOST_TARS:,} names, found more")
    for text in names:
        found = sorted(glob.glob(text)) if _MAGIC.search(text) else [text] * os.path.exists(text)
        paths |= dict.fromkeys(found)
        if not found:
            missing.append(text)
    if missing:
        raise SourceError(
            f"{pattern}: expected a file for each name, found none for {missing[0]!r} ({len(missing):,} missing in all)"
        )
    return list(paths)


def _expand_braces(text: str) -> Iterator[str]:
    start = text.find("{")
    if start < 0:
        yield text
        return
    depth, bounds = 0, [start]
    for at in range(start, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0 or (depth == 1 and text[at] == ","):
            bounds.append(at)
        if depth == 0:
            break
    words: Iterable[str] = [text[one + 1 : other] for one, other in pairwise(bounds)]
    if depth or len(bounds) == 2:
        numbers = re.match(r"\{(\d+)\.\.(\d+)\}", text[start:])
        if numbers is None:
            found = text[start : bounds[-1] + 1]
            raise SourceError(f"{text}: expected {{FIRST..LAST}} or {{ONE,OTHER}}, found {found!r}")
        first, last = numbers.groups()
        # As a shell does: as many digits as the longer one has, if either begins with a zero.
        width = max(len(first), len(last)) if re.match(r"0\d", first) or re.match(r"0\d", last) else 0
        words = (f"{number:0{width}}" for number in range(int(first), int(last) + 1))
    for word in words:
        yield from _expand_braces(text[:start] + word + text[bounds[-1] + 1 :])


# --- samples ----------------------------------------------------------------------------------------------------------


@dataclass
class _Parts:
    """Members of a tar that make up one sample."""

    images: list[tuple[str, Extent]] = field(default_factory=list)
    cls: list[str | Fault] = field(default_factory=list)
    json: list[str | Fault] = field(default_factory=list)


def _walk(folder: Path, tar: str) -> Generator[_Sample | str, None, None]:
    """Yields the samples of a tar, and for each other member the kind as which it is ignored."""
    found: dict[str, _Parts] = {}  # the parts of a sample need not be neighbours
    with open_archive(folder / tar) as archive:
        for member in members(archive):
            name = os.fsdecode(member.name)
            if kind := clutter_in(name):
                yield kind
                continue
            above, slash, base = name.rpartition("/")
            stem, _, suffix = base.partition(".")
            suffix = suffix.lower()
            if suffix in _IMAGE_SUFFIXES:
                place = Extent(os.fsencode(tar), member.offset, member.nbytes)
                found.setdefault(above + slash + stem, _Parts()).images.append((name, place))
            elif suffix in ("cls", "json") and member.nbytes <= _MAX_LABEL_NBYTES:
                content = archive.read_at(member.offset, member.nbytes)
                parts = found.setdefault(above + slash + stem, _Parts())
                if suffix == "cls":
                    parts.cls.append(_read_text(content))
                else:
                    parts.json += _read_json(content)
            else:
                yield "neither image nor label"
    for name, parts in found.items():
        yield _put_together(tar, name, parts)


def _put_together(tar: str, name: str, parts: _Parts) -> _Sample | str:
    labels = parts.cls or parts.json
    if not parts.images and not labels:
        return "neither image nor label"
    what, label = f"the sample {name!r} in {tar}", labels[0] if labels else ""
    place: Extent | Fault
    if len(parts.images) != 1:
        place = Fault(f"expected one image of {what}, found {len(parts.images)}")
    elif len(labels) != 1:
        place = Fault(f"expected one label (.cls or .json) of {what}, found {len(labels)}")
    elif isinstance(label, Fault):
        place = Fault(f"the label of {what}: {label.detail}")
    else:
        place = parts.images[0][1]
    image = parts.images[0][0] if parts.images else name
    return _Sample(tar, image, place, label if isinstance(label, str) else "")


def _read_text(content: bytes) -> str | Fault:
    try:
        return content.decode().strip()
    except UnicodeDecodeError:
        return Fault(f"expected UTF-8, found {content!r:.80}")


def _read_json(content: bytes) -> list[str | Fault]:
    """Returns no label if no field is one: a .json may be there for other things."""
    try:
        document = json.loads(content)
        name = next((name for name in _LABEL_FIELDS if name in document), None) if isinstance(document, dict) else None
        if name is None:
            return []
        value = document[name]
        if type(value) is int:
            return [str(value)]
        if isinstance(value, str):
            return [_read_text(value.encode())]
        hint = f" ({NO_VECTORS})" if isinstance(value, list) else ""
        return [Fault(f"expected an integer or a name as {name!r}, found {value!r:.80}{hint}")]
    except (ValueError, RecursionError) as error:
        return [Fault(f"expected JSON, found: {error}")]


# --- splits and keys --------------------------------------------------------------------------------------------------


def _splits(src: Path, tars: list[str], samples: list[_Sample]) -> list[str]:
    """Returns the split of each sample; "" for all if nothing tells any."""
    told = {tar: _word_of_tar(tar) for tar in tars}
    if all(told.values()):
        _check_words(src, told.values())
        return [split_name(told[sample.tar]) for sample in samples]
    if any(told.values()):
        one, other = (next(tar for tar in tars if bool(told[tar]) == known) for known in (True, False))
        raise SourceError(
            f"{src}: expected every tar, or none, to tell its split by its name or folder, found {one!r} of "
            f"{split_name(told[one])!r} beside {other!r}. Put them in folders {', '.join(SPLIT_NAMES)}"
        )
    firsts = [sample.name.partition("/")[0] for sample in samples]
    if not all(map(known_split, firsts)):
        return [""] * len(samples)
    _check_words(src, firsts)
    return list(map(split_name, firsts))


def _word_of_tar(tar: str) -> str:
    """Returns the word for a split in its folders, or else in its name: imagenet1k-validation-07.tar is of val."""
    *folders, name = tar.split("/")
    for words in (folders, re.findall("[a-z]+", name.lower())):
        found = {split: word for word in words if (split := known_split(word))}
        if len(found) > 1:
            raise SourceError(
                f"{tar}: expected the name of one split in it, found {' and '.join(sorted(found))}. Put the tars in "
                f"folders {', '.join(SPLIT_NAMES)}"
            )
        if found:
            return found.popitem()[1]
    return ""


def _check_words(src: Path, words: Iterable[str]) -> None:
    if (both := two_words(map(str.lower, words))) is not None:
        raise SourceError(
            f"{src}: expected one word for the split {split_name(both[0])!r}, found {both[0]!r} and {both[1]!r}. "
            "Rename the tars or folders of one, or convert them apart"
        )


def _sources(
    samples: list[_Sample], splits: list[str], numbering: Numbering, keep_tar: bool
) -> dict[str, list[Source]]:
    """Returns the sources by split. `keep_tar` puts the name of its tar before that of each sample."""
    sources: dict[str, list[Source]] = {}
    for sample, split in zip(samples, splits, strict=True):
        name, place, label, folders = sample.name, sample.place, 0, []
        if split:
            folders.append(split)
            first, _, rest = name.partition("/")
            name = rest if rest and split_name(first) == split else name
        if not isinstance(place, Fault):
            if expected := numbering.faults.get((split, sample.label)):
                found = f"expected {expected}, found {sample.label!r:.80}"
                place = Fault(f"the label of the sample {name!r} in {sample.tar}: {found}")
            else:
                label = numbering.labels[sample.label]
                folders.append(numbering.classes[label])
                name = name.removeprefix(folders[-1] + "/")
        if keep_tar:
            folders.append(sample.tar.removeprefix(f"{split}/").removesuffix(".tar"))
        key = os.fsencode("/".join((*folders, name)))
        sources.setdefault(split, []).append(Source(key, label, place))
    return sources


def _keys(sources: dict[str, list[Source]]) -> Iterator[bytes]:
    return (source.key for source in chain.from_iterable(sources.values()))
