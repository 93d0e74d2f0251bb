"""Lists archives: tars and zips. Members whose names are equal but for the suffix are a sample: an image and its label.

Keys are [SPLIT/]CLASS/NAME, the paths of images in a folder tree. So tars that were made from a folder tree give the
same set as the tree, whether or not the names of the samples include folders.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Set
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path

from shardio.conversion.images.headers import ALL_SUFFIXES, has_image_suffix
from shardio.conversion.options import Labels
from shardio.conversion.sources.archives import ZIP_MAGIC, list_members, zip_members
from shardio.conversion.sources.collection import Collection, Extent, Fault, FileOrigin, read_file
from shardio.conversion.sources.doubt import UNLABELED, DoubtError, Reading
from shardio.conversion.sources.listing import Found, Listing
from shardio.conversion.sources.meaning import TABLES
from shardio.conversion.sources.names import (
    NO_VECTORS,
    SPLIT_NAMES,
    Ignored,
    in_split_order,
    known_split,
    sorted_entries,
    split_name,
)
from shardio.conversion.sources.tar import drain, members, open_archive
from shardio.errors import DecodeError, SourceError, counted
from shardio.system.opening import open_file

# Fields of a .json member: the first that is there counts.
_LABEL_FIELDS = ("label", "class", "cls")
_MAX_LABEL_NBYTES = 1 << 20
_NO_LABEL = "-1"
"""The label that tars made from data sets of Hugging Face have where labels are not public."""

# 1.txt, 1.json, 1.label, 1.cls.txt: a caption, or perhaps a label.
_OF_IMAGE = re.compile(r"(.+?)(\.txt|\.json|\.(cls|class|label|target)s?(\.\w+)?)", re.IGNORECASE | re.DOTALL)

ARCHIVES = (".tar", ".zip")

_WAY_OUT = f"put the tars in folders {', '.join(SPLIT_NAMES)}"
_MAGIC = re.compile(r"[{*?[]")
_MOST_TARS = 1_000_000


def list_webdataset(
    src: Path, labels: Labels | None = None, told: Set[str] | None = None, *, skips_unlabeled: bool = False
) -> Listing:
    """Returns the images of an archive (tar or zip), of the archives in a folder and its subfolders, or of a pattern.

    - A pattern has braces, as in train-{000..146}.tar, or wildcards, as in *.tar.
    - A label is the content of a .cls member, or a field of a .json member.
    - A split is named by the folders or names of the archives, or by the first folder in the names of all samples.
    - A sample without an image becomes a source that the conversion refuses. So does a sample without a label, unless
      `labels`, `skips_unlabeled` or `told` is given. `told` are the splits whose labels are in a table.
    - If there is no label at all, or `labels` says so, folders mean what they mean in a tree.
    """
    folder, archives, ignored = _find_archives(src)
    beside: dict[str, str] = {}
    needs_labels = labels is None and not told
    walks = (_walk(folder, name, ignored, beside, needs_labels) for name in archives)
    samples = list(chain.from_iterable(drain(walks)))
    words = _words(src, archives)
    if not samples:
        raise SourceError(f"{src}: expected images, found none; pass `--source ilsvrc` for ImageNet's own archives")
    is_bare = "label" not in beside
    if "caption" in beside and is_bare and labels is None:
        folders = Reading("folders in archives are classes", {"--labels": "folders"})
        ways = [folders, UNLABELED] if any(b"/" in one.key for one in samples) else [UNLABELED]
        found = f"found files such as {beside['caption']!r} next to images"
        raise DoubtError(src, f"expected labels (.cls or .json) of samples, {found}", ways)
    if labels in ("folders", "leaf") or (is_bare and "caption" not in beside):
        images = [one for one in samples if not isinstance(one.place, Fault)]
        listing = list_members(src, folder, images, words, ignored, labels, told)
        if "table" in beside and needs_labels and not (listing.doubts or listing.classes):
            found = f"found the table {beside['table']!r} next to them: unpack it, and pass it by `--table`"
            raise DoubtError(src, f"expected images in class folders, {found}", [UNLABELED])
        return listing
    if skips_unlabeled:
        samples = [one._replace(label=None) if one.label == _NO_LABEL else one for one in samples]
    elif needs_labels:
        has_labels = {
            split_name(word): any(one.label not in (None, _NO_LABEL) or isinstance(one.place, Fault) for one in some)
            for word, some in _by_word(words, samples).items()
        }
        first, *others = in_split_order(has_labels)
        if bare := [split for split in others if has_labels[first] and not has_labels[split]]:
            expected = f"expected labels (.cls or .json) in the split {bare[0]!r}, as in {first!r}, found none"
            skip = Reading(f"the split {bare[0]} has no labels", {"--unlabeled": "skip"})
            raise DoubtError(src, expected, [skip, UNLABELED])
        samples = [
            one._replace(place=Fault(f"expected one label (.cls or .json) of {_name(one)}, found 0 labels"))
            if one.label is None and not isinstance(one.place, Fault)
            else one
            for one in samples
        ]
    faults = [sample.place.detail for sample in samples if isinstance(sample.place, Fault)]
    if len(faults) == len(samples):
        expected = f"expected samples of an image and a label (.cls or .json), found none among {len(samples):,}"
        raise DoubtError(src, f"{expected}; the first: {faults[0]}", [UNLABELED])
    known = Collection(FileOrigin(folder), ignored=ignored, kind="webdataset")
    return _Tars(src, _by_word(words, samples), known, may_rename=True)


class _Tars(Listing):
    """A Listing of the samples in archives. `where` of each sample is the path of its archive in SRC."""

    def key(self, split: str, one: Found, name: str, again: bool) -> bytes:
        tar, rest = one.where, os.fsdecode(one.key)
        first, _, below = rest.partition("/")
        if split and below and split_name(first) == split:
            rest = below
        # Names of samples may begin anew in each tar.
        tar = os.path.splitext(tar.removeprefix(f"{split}/"))[0] if again else ""
        return os.fsencode("/".join(filter(None, (split, name, tar, rest.removeprefix(f"{name}/") if name else rest))))

    def refuse(self, one: Found, expected: str, found: object) -> Fault:
        """Returns a Fault that refuses only this sample, as a few of millions of samples often have no valid label."""
        if isinstance(one.place, Fault):
            return one.place
        return Fault(f"the label of {_name(one)}: expected {expected}, found {found!r:.80}")

    def lacks_label(self, one: Found) -> bool:
        return one.label is None and not isinstance(one.place, Fault)

    def refuse_repeat(self, one: Found, first: Found) -> None:
        raise SourceError(f"{self.src}: expected distinct names of samples in a tar, found {_name(one)} twice")


# --- tars -------------------------------------------------------------------------------------------------------------


def is_pattern(src: Path) -> bool:
    """Whether `src` is a pattern of file names, such as *.tar, and not the name of an existing file."""
    return _MAGIC.search(str(src)) is not None and not os.path.lexists(src)


def _find_archives(src: Path) -> tuple[Path, list[str], Ignored]:
    """Returns (a folder, the paths of all archives in SRC relative to the folder, counts of other files)."""
    ignored = Ignored(src)
    if is_pattern(src):
        folder = Path(os.path.dirname(_MAGIC.split(str(src), maxsplit=1)[0]))
        names = list(islice(_expand_braces(str(src)), _MOST_TARS + 1))
        if len(names) > _MOST_TARS:
            raise SourceError(f"{src}: expected braces that stand for at most {_MOST_TARS:,} names, found more")
        found = {name: sorted(glob.glob(name)) for name in names}
        if missing := [name for name, paths in found.items() if not paths]:
            found_none = f"found none for {missing[0]!r} ({counted(len(missing), 'name')} without a file)"
            raise SourceError(f"{src}: expected at least one file for each name in the pattern, {found_none}")
        paths = dict.fromkeys(chain.from_iterable(found.values()))
        return folder, [os.path.relpath(path, folder) for path in paths], ignored
    if not src.is_dir():
        return src.parent, [src.name], ignored
    tars = []
    for entry in sorted_entries(src, ignored):
        for one in sorted_entries(src / entry.name, ignored) if entry.is_dir() else [entry]:
            if one.name.endswith(ARCHIVES):
                tars.append(os.path.relpath(one.path, src))
            else:
                ignored.add("other file", one.path)
    if not tars:
        raise SourceError(f"{src}: expected tars or zips in this folder or its subfolders, found none")
    return src, tars, ignored


def _expand_braces(text: str) -> Iterator[str]:
    """Yields the names that a pattern stands for, with its braces expanded as in a shell."""
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
        # As in a shell: as many digits as the longer one has, if either begins with a zero.
        width = max(len(first), len(last)) if re.match(r"0\d", first) or re.match(r"0\d", last) else 0
        words = (f"{number:0{width}}" for number in range(int(first), int(last) + 1))
    for word in words:
        yield from _expand_braces(text[:start] + word + text[bounds[-1] + 1 :])


# --- samples ----------------------------------------------------------------------------------------------------------


def _walk(
    folder: Path, archive: str, ignored: Ignored, beside: dict[str, str], needs_labels: bool
) -> Generator[Found, None, None]:
    """Yields each sample of the archive whose path, relative to `folder`, is `archive`. A missing label is None.

    The place of a sample is a Fault if the sample has no image or several images. With `needs_labels`, it is also a
    Fault if the sample has several labels, or an invalid label. Other members are counted in `ignored`. `beside` gets
    the name of an example of what the archive has: under "label" a sample with a label, under "caption" a text or JSON
    next to an image, and under "table" a table.
    """
    # The images of each sample, and its labels from .cls and .json: they need not be neighbors.
    found: dict[str, tuple[list[tuple[str, Extent]], list[str | Fault], list[str | Fault]]] = {}
    texts: dict[str, str] = {}
    for name, extent, read in _contents(folder / archive, os.fsencode(archive), ignored):
        stem, suffix = os.path.splitext(name)
        suffix = suffix.lower()
        is_label = suffix in (".cls", ".json") and (extent.zipped or extent).nbytes <= _MAX_LABEL_NBYTES
        if suffix not in ALL_SUFFIXES and (match := _OF_IMAGE.fullmatch(name)):
            texts[match[1]] = name
        if not (is_label or suffix in ALL_SUFFIXES):
            ignored.add("neither image nor label", name)
            if suffix in TABLES:
                beside.setdefault("table", name)
            continue
        images, from_cls, from_json = found.setdefault(stem, ([], [], []))
        if not is_label:
            images.append((name, extent))
        elif suffix == ".cls":
            from_cls.append(_read_text(read()))
        else:
            from_json += _read_json(read())
    bare = {stem for stem, (images, *labels) in found.items() if images and not any(labels)}
    for stem, (images, from_cls, from_json) in list(found.items()):
        labels = from_cls or [label for label in from_json if isinstance(label, str)]
        if labels and not images and (whole := _whole(stem, found)) in bare:  # 1.target.cls next to 1.png
            found[whole][1].extend(labels)
            del found[stem]
    for stem, (images, from_cls, from_json) in found.items():
        labels = from_cls or from_json
        others = [one for one in images if not has_image_suffix(one[0])]
        if len(others) < len(images):  # otherwise the picture is of a kind that is refused
            images = [one for one in images if one not in others]
            for name, _ in others:
                ignored.add("neither image nor label", name)
        if not (images or labels):
            ignored.add("neither image nor label", stem)
            continue
        if not (images and labels) and _whole(stem, found):
            ignored.add("part of another sample", images[0][0] if images else stem)
            continue
        if images and stem in texts:
            beside.setdefault("caption", texts[stem])
        if labels:
            beside.setdefault("label", stem)
        label = labels[0] if len(labels) == 1 else None
        one = Found(os.fsencode(images[0][0] if images else stem), None, None, archive)
        if len(images) != 1:
            expected = f"expected one image of {_name(one)}"
            yield one._replace(place=Fault(f"{expected}, found {counted(len(images), 'image')}"))
        elif len(labels) > 1 and needs_labels:
            expected = f"expected one label (.cls or .json) of {_name(one)}"
            yield one._replace(place=Fault(f"{expected}, found {len(labels)} labels"))
        elif isinstance(label, Fault) and needs_labels:
            yield one._replace(place=Fault(f"the label of {_name(one)}: {label.detail}"))
        else:
            yield one._replace(label=label if isinstance(label, str) else None, place=images[0][1])


def _read_label(path: Path, name: str, extent: Extent) -> bytes:
    try:
        return read_file(path, extent)
    except DecodeError as error:
        raise SourceError(f"{path}: {name!r}: {error}") from None


def _contents(path: Path, file: bytes, ignored: Ignored) -> Iterator[tuple[str, Extent, Callable[[], bytes]]]:
    """Yields (name, place, function that returns the content) of each file in the archive `path`. A place is an Extent
    whose `file` is the argument `file`."""
    # Non-blocking, so that a FIFO does not stop us for ever.
    with open_file(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) as opened:
        is_zip = opened.read(len(ZIP_MAGIC)) == ZIP_MAGIC
    if is_zip:
        for name, extent in zip_members(path, file, ignored):
            yield name, extent, partial(_read_label, path, name, extent)
        return
    with open_archive(path) as archive:
        for name, extent in members(archive, file, ignored):
            yield name, extent, partial(archive.read_at, extent.offset, extent.nbytes)


def _whole(name: str, samples: Container[str]) -> str:
    """Returns the longest other name in `samples` that a sample's name is up to a dot, as y.seg is a part of the sample
    y; "" if there is none."""
    while "." in os.path.basename(name):
        name = name.rpartition(".")[0]
        if name in samples:
            return name
    return ""


def _name(one: Found) -> str:
    return f"the sample {os.fsdecode(one.key)!r} in {one.where}"


def _read_text(content: bytes) -> str | Fault:
    try:
        return content.decode().strip()
    except UnicodeDecodeError:
        return Fault(f"expected UTF-8, found {content!r:.80}")


def _read_json(content: bytes) -> list[str | Fault]:
    """Returns [label] from a .json member; [a Fault] if the label or the JSON is invalid; [] if there is no label."""
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
        return [Fault(f"expected an integer or a class name in {name!r}, found {value!r:.80}{hint}")]
    except (ValueError, RecursionError) as error:
        return [Fault(f"the .json is not valid JSON: {error}")]


# --- splits -----------------------------------------------------------------------------------------------------------


def _words(src: Path, archives: list[str]) -> dict[str, str]:
    """Returns the word for a split in the path of each archive, such as "validation" for in1k-validation-07.tar;
    "" for all archives if none has one. Words of folders come before words of names, unless all archives are in
    folders of one split, and their names tell several."""
    above = {tar: _splits_in(tar.split("/")[:-1]) for tar in archives}
    named = {tar: _splits_in(re.findall("[a-z]+", os.path.basename(tar).lower())) for tar in archives}
    named = {tar: {} if len(found) > 1 and above[tar] else found for tar, found in named.items()}
    if len(set().union(*named.values())) < 2 or not all(len(found) == 1 for found in named.values()):
        named = {tar: above[tar] or found for tar, found in named.items()}
    elif len(set(map(frozenset, above.values()))) > 1:
        named = {tar: found | above[tar] for tar, found in named.items()}
    if several := next((tar for tar, found in named.items() if len(found) > 1), ""):
        both = " and ".join(sorted(named[several]))
        raise SourceError(f"{src}: expected the name of one split in {several!r}, found {both}: {_WAY_OUT}")
    told = {tar: "".join(found.values()) for tar, found in named.items()}
    if any(told.values()) and not all(told.values()):
        one, other = (next(archive for archive in archives if bool(told[archive]) == known) for known in (True, False))
        some = f"{split_name(told[one])!r} for {one!r} and none for {other!r}: {_WAY_OUT}"
        raise SourceError(f"{src}: expected a split in the name or folder of every archive, or of none, found {some}")
    return told


def _splits_in(words: Iterable[str]) -> dict[str, str]:
    """Returns the word for each split that is named in `words`, by the set's name for the split."""
    return {split: word for word in words if (split := known_split(word))}


def _by_word(told: Mapping[str, str], samples: list[Found]) -> dict[str, list[Found]]:
    """Returns the samples by SRC's word for their split: the archive's word in `told`, or if that is "", the first
    folder in the sample's name. If that is no word for a split for some sample, returns all samples by ""."""
    words = [(told[one.where] or os.fsdecode(one.key).partition("/")[0]).lower() for one in samples]
    if not all(map(known_split, words)):
        return {"": samples}
    found: dict[str, list[Found]] = {}
    for word, sample in zip(words, samples, strict=True):
        found.setdefault(word, []).append(sample)
    return found
