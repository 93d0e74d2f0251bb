"""WebDataset tars: members whose names are equal up to the first dot form a sample, an image and its label.

Keys are the paths of the images in a folder tree: [SPLIT/]CLASS/NAME. So samples made from such a tree give the same
set as the tree, whether or not the names of the samples include folders.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import NamedTuple

from shardio.conversion.sources.collection import Collection, Extent, Fault, FileOrigin, Source
from shardio.conversion.sources.names import (
    DEFAULT_SPLIT,
    NO_VECTORS,
    SPLIT_NAMES,
    Numbering,
    check_split_words,
    in_split_order,
    known_split,
    number_labels,
    sorted_entries,
    split_name,
)
from shardio.conversion.sources.tar import drain, open_archive, visible_members
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
    """The name of the image; the name of the sample, without a suffix, if there is no image."""
    place: Extent | Fault
    label: str
    """The label as written in the tar; "" if there is no label."""


def scan_webdataset(src: Path, *, unlabeled: bool = False) -> Collection:
    """Returns the samples of a tar, of the tars in or below a folder, or of a pattern: train-{000..146}.tar, *.tar.

    - Images are jpg, jpeg, png or webp.
    - Labels are the content of a .cls, or "label", "class" or "cls" in a .json: all integers, or all class names.
    - The split is named by the tars' folders or names, or by the first folder of all samples; otherwise it is train.
    - Samples keep the order of the tars. A sample without a label or an image is a source that will be refused; with
      `unlabeled`, only a sample without an image.

    Raises SourceError if a tar is damaged, or if tars contradict each other.
    """
    folder, tars, ignored = _find_tars(src)
    kinds: list[str] = []
    samples = list(chain.from_iterable(drain(_walk(folder, tar, kinds, unlabeled) for tar in tars)))
    ignored.update(kinds)
    faults = [sample.place for sample in samples if isinstance(sample.place, Fault)]
    if len(faults) == len(samples):
        found_instead = f"none in {len(samples):,}: {faults[0].detail}" if samples else "no sample"
        raise SourceError(
            f"{src}: expected samples of an image and a label (.cls or .json), found {found_instead}. (Unpack the tar "
            "of a folder tree; ImageNet's own archives need `--source ilsvrc`; images alone need `--labels none`)"
        )
    splits = _splits(src, tars, samples)
    labeled = zip(splits, samples, strict=True)
    numbering = number_labels({(split, one.label) for split, one in labeled if not isinstance(one.place, Fault)})
    for keep_tar in (False, True):  # names may begin anew in each tar
        sources = _sources(samples, splits, numbering, keep_tar, unlabeled)
        listed = list(chain.from_iterable(sources.values()))
        if (key := first_repeated(source.key for source in listed)) is None:
            break
    if key is not None:
        raise SourceError(f"{src}: expected each name of a sample once in a tar, found {os.fsdecode(key)!r} twice")
    faults = [source.place for source in listed if isinstance(source.place, Fault)]
    if len(faults) == len(samples):
        raise SourceError(f"{src}: expected samples with a label, found none in {len(samples):,}: {faults[0].detail}")
    by_split = {split or DEFAULT_SPLIT: tuple(sources[split]) for split in in_split_order(splits)}
    return Collection(FileOrigin(folder), numbering.classes, by_split, ignored, kind="webdataset")


# --- tars -------------------------------------------------------------------------------------------------------------


def is_pattern(src: Path) -> bool:
    """Whether `src` is a pattern of file names, and not the name of an existing file."""
    return _MAGIC.search(str(src)) is not None and not os.path.lexists(src)


def _find_tars(src: Path) -> tuple[Path, list[str], Counter[str]]:
    """Returns (a folder, the paths of all tars relative to the folder, counts of other files by kind)."""
    ignored: Counter[str] = Counter()
    if is_pattern(src):
        fixed = _MAGIC.split(str(src), maxsplit=1)[0]
        folder = Path(os.path.dirname(fixed))
        return folder, [os.path.relpath(path, folder) for path in _expand(str(src))], ignored
    if not src.is_dir():
        return src.parent, [src.name], ignored
    tars = []
    for entry in sorted_entries(src, ignored):
        for one in sorted_entries(src / entry.name, ignored) if entry.is_dir() else [entry]:
            if one.name.endswith(".tar"):
                tars.append(os.path.relpath(one.path, src))
            else:
                ignored["other file"] += 1
    if not tars:
        raise SourceError(f"{src}: expected tars in it or in its folders, found none")
    return src, tars, ignored


def _expand(pattern: str) -> list[str]:
    """Returns the files that match a pattern, in the order of the pattern: braces as in a shell, then *, ? and []."""
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
        # As in a shell: as many digits as the longer one has, if either begins with a zero.
        width = max(len(first), len(last)) if re.match(r"0\d", first) or re.match(r"0\d", last) else 0
        words = (f"{number:0{width}}" for number in range(int(first), int(last) + 1))
    for word in words:
        yield from _expand_braces(text[:start] + word + text[bounds[-1] + 1 :])


# --- samples ----------------------------------------------------------------------------------------------------------


def _walk(folder: Path, tar: str, ignored: list[str], unlabeled: bool) -> Generator[_Sample, None, None]:
    """Yields the samples of a tar. Adds the kinds of other members to `ignored`."""
    # The images of each sample, and its labels from .cls and .json: they need not be neighbors.
    found: dict[str, tuple[list[tuple[str, Extent]], list[str | Fault], list[str | Fault]]] = {}
    tar_bytes = os.fsencode(tar)
    with open_archive(folder / tar) as archive:
        for member in visible_members(archive, ignored):
            name = os.fsdecode(member.name)
            above, slash, base = name.rpartition("/")
            stem, _, suffix = base.partition(".")
            suffix = suffix.lower()
            is_image = suffix in _IMAGE_SUFFIXES
            if not is_image and (suffix not in ("cls", "json") or member.nbytes > _MAX_LABEL_NBYTES):
                ignored.append("neither image nor label")
                continue
            images, from_cls, from_json = found.setdefault(above + slash + stem, ([], [], []))
            if is_image:
                images.append((name, Extent(tar_bytes, member.offset, member.nbytes)))
            elif suffix == "cls":
                from_cls.append(_read_text(archive.read_at(member.offset, member.nbytes)))
            else:
                from_json += _read_json(archive.read_at(member.offset, member.nbytes))
    for name, (images, from_cls, from_json) in found.items():
        if images or from_cls or from_json:
            yield _put_together(tar, name, images, from_cls or from_json, unlabeled)
        else:
            ignored.append("neither image nor label")


def _put_together(
    tar: str, name: str, images: list[tuple[str, Extent]], labels: list[str | Fault], unlabeled: bool
) -> _Sample:
    what, label = f"the sample {name!r} in {tar}", labels[0] if labels else ""
    place: Extent | Fault
    if len(images) != 1:
        place = Fault(f"expected one image of {what}, found {len(images)}")
    elif unlabeled:
        place = images[0][1]
    elif len(labels) != 1:
        place = Fault(f"expected one label (.cls or .json) of {what}, found {len(labels)}")
    elif isinstance(label, Fault):
        place = Fault(f"the label of {what}: {label.detail}")
    else:
        place = images[0][1]
    image = images[0][0] if images else name
    return _Sample(tar, image, place, label if isinstance(label, str) else "")


def _read_text(content: bytes) -> str | Fault:
    try:
        return content.decode().strip()
    except UnicodeDecodeError:
        return Fault(f"expected UTF-8, found {content!r:.80}")


def _read_json(content: bytes) -> list[str | Fault]:
    """Returns the label in a .json, or a Fault if the label or file is invalid; [] if no field is a label."""
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
    """Returns the split of each sample, or "" for all samples if no name contains a split."""
    told = {tar: _word_of_tar(tar) for tar in tars}
    if any(told.values()) and not all(told.values()):
        one, other = (next(tar for tar in tars if bool(told[tar]) == known) for known in (True, False))
        raise SourceError(
            f"{src}: expected a split in the name or folder of every tar, or of none, found "
            f"{split_name(told[one])!r} for {one!r} and none for {other!r}. Put them in folders "
            f"{', '.join(SPLIT_NAMES)}"
        )
    words = [told[sample.tar] or sample.name.partition("/")[0] for sample in samples]
    if not all(map(known_split, words)):
        return [""] * len(samples)
    way_out = "Rename the tars or folders of one, or convert them separately"
    check_split_words(src, map(str.lower, filter(None, [*told.values(), *words])), way_out)
    return list(map(split_name, words))


def _word_of_tar(tar: str) -> str:
    """Returns the word for a split in the tar's folders or name: "validation" for imagenet1k-validation-07.tar."""
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


def _sources(
    samples: list[_Sample], splits: list[str], numbering: Numbering, keep_tar: bool, unlabeled: bool
) -> dict[str, list[Source]]:
    """Returns the sources by split. `keep_tar` puts the name of the tar before the name of each sample."""
    sources: dict[str, list[Source]] = {}
    for sample, split in zip(samples, splits, strict=True):
        name, place, label, folders = sample.name, sample.place, 0, []
        if split:
            folders.append(split)
            first, _, rest = name.partition("/")
            name = rest if rest and split_name(first) == split else name
        if not isinstance(place, Fault):
            expected = numbering.expected.get((split, sample.label))
            if not expected:
                label = numbering.labels[sample.label]
                folders.append(numbering.classes[label])
                name = name.removeprefix(folders[-1] + "/")
            elif not unlabeled:
                found = f"expected {expected}, found {sample.label!r:.80}"
                place = Fault(f"the label of the sample {name!r} in {sample.tar}: {found}")
        if keep_tar:
            folders.append(sample.tar.removeprefix(f"{split}/").removesuffix(".tar"))
        key = os.fsencode("/".join((*folders, name)))
        sources.setdefault(split, []).append(Source(key, label, place))
    return sources
