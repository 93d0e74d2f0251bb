"""Lists WebDataset tars. Members whose names are equal but for the suffix are a sample: an image and its label.

Keys are [SPLIT/]CLASS/NAME, the paths of images in a folder tree. So tars that were made from a folder tree give the
same set as the tree, whether or not the names of the samples include folders.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Container, Generator, Iterable, Iterator
from itertools import chain, islice, pairwise
from pathlib import Path

from shardio.conversion.images.headers import has_image_suffix
from shardio.conversion.sources.collection import Collection, Extent, Fault, FileOrigin, Ignored
from shardio.conversion.sources.doubt import UNLABELED, DoubtError
from shardio.conversion.sources.listing import Found, Listing
from shardio.conversion.sources.names import NO_VECTORS, SPLIT_NAMES, known_split, sorted_entries, split_name
from shardio.conversion.sources.tar import drain, members, open_archive
from shardio.errors import SourceError, counted

# Fields of a .json member: the first that is there counts.
_LABEL_FIELDS = ("label", "class", "cls")
_MAX_LABEL_NBYTES = 1 << 20

_WAY_OUT = f"put the tars in folders {', '.join(SPLIT_NAMES)}"
_MAGIC = re.compile(r"[{*?[]")
_MOST_TARS = 1_000_000


def list_webdataset(src: Path, *, unlabeled: bool = False, skips_unlabeled: bool = False) -> Listing:
    """Returns the samples of a tar, of all tars in a folder and its subfolders, or of the tars that match a pattern.

    - A pattern has braces, as in train-{000..146}.tar, or wildcards, as in *.tar.
    - A label is the content of a .cls member, or a field of a .json member.
    - A split is named by the folders or names of the tars, or by the first folder in the names of all samples.
    - A sample without an image, or without a label unless `unlabeled` or `skips_unlabeled`, becomes a source that the
      conversion refuses.
    """
    folder, tars, ignored = _find_tars(src)
    samples = list(chain.from_iterable(drain(_walk(folder, tar, ignored, unlabeled, skips_unlabeled) for tar in tars)))
    faults = [sample.place.detail for sample in samples if isinstance(sample.place, Fault)]
    if len(faults) == len(samples):
        instead = f"none among {len(samples):,}; the first: {faults[0]}" if faults else "no sample"
        expected = f"expected samples of an image and a label (.cls or .json), found {instead}"
        way = "Unpack the tar of a folder tree; pass `--source ilsvrc` for ImageNet's own archives"
        raise DoubtError(src, f"{expected}. {way}", [UNLABELED])
    known = Collection(FileOrigin(folder), ignored=ignored, kind="webdataset")
    return _Tars(src, _by_word(src, tars, samples), known, may_rename=True)


class _Tars(Listing):
    """A Listing of the samples in tars. `where` of each sample is the name of its tar."""

    def key(self, split: str, one: Found, name: str, again: bool) -> bytes:
        tar, rest = one.where, os.fsdecode(one.key)
        first, _, below = rest.partition("/")
        if split and below and split_name(first) == split:
            rest = below
        # Names of samples may begin anew in each tar.
        tar = tar.removeprefix(f"{split}/").removesuffix(".tar") if again else ""
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


def _find_tars(src: Path) -> tuple[Path, list[str], Ignored]:
    """Returns (a folder, the paths of all tars relative to the folder, counts of other files by kind)."""
    ignored = Ignored(src)
    if is_pattern(src):
        fixed = _MAGIC.split(str(src), maxsplit=1)[0]
        folder = Path(os.path.dirname(fixed))
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
            if one.name.endswith(".tar"):
                tars.append(os.path.relpath(one.path, src))
            else:
                ignored.add("other file", one.path)
    if not tars:
        raise SourceError(f"{src}: expected tars in this folder or its subfolders, found none")
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
    folder: Path, tar: str, ignored: Ignored, unlabeled: bool, skips_unlabeled: bool
) -> Generator[Found, None, None]:
    """Yields the samples of a tar. Counts other members in `ignored`.

    The place of a sample is a Fault unless it has one image and one label (any labels if `unlabeled`).
    """
    # The images of each sample, and its labels from .cls and .json: they need not be neighbors.
    found: dict[str, tuple[list[tuple[str, Extent]], list[str | Fault], list[str | Fault]]] = {}
    file = os.fsencode(tar)
    with open_archive(folder / tar) as archive:
        for member in members(archive, ignored):
            name = os.fsdecode(member.name)
            stem, suffix = os.path.splitext(name)
            is_label = suffix.lower() in (".cls", ".json") and member.nbytes <= _MAX_LABEL_NBYTES
            if not (is_label or has_image_suffix(name)):
                ignored.add("neither image nor label", name)
                continue
            images, from_cls, from_json = found.setdefault(stem, ([], [], []))
            if not is_label:
                images.append((name, Extent(file, member.offset, member.nbytes)))
            elif suffix.lower() == ".cls":
                from_cls.append(_read_text(archive.read_at(member.offset, member.nbytes)))
            else:
                from_json += _read_json(archive.read_at(member.offset, member.nbytes))
    for name, (images, from_cls, from_json) in found.items():
        labels = from_cls or from_json
        if not (images or labels):
            ignored.add("neither image nor label", name)
            continue
        if not (images and labels) and _is_part(name, found):
            ignored.add("part of another sample", images[0][0] if images else name)
            continue
        label = labels[0] if labels else None
        one = Found(os.fsencode(images[0][0] if images else name), label if isinstance(label, str) else None, None, tar)
        wrong = ""
        if len(images) != 1:
            wrong = f"expected one image of {_name(one)}, found {counted(len(images), 'image')}"
        elif not unlabeled and (len(labels) > 1 or not (labels or skips_unlabeled)):
            wrong = f"expected one label (.cls or .json) of {_name(one)}, found {counted(len(labels), 'label')}"
        elif isinstance(label, Fault) and not unlabeled:
            wrong = f"the label of {_name(one)}: {label.detail}"
        yield one._replace(label=None, place=Fault(wrong)) if wrong else one._replace(place=images[0][1])


def _is_part(name: str, samples: Container[str]) -> bool:
    """Whether a name with dots belongs to one of `samples`, as y.seg does to y."""
    while "." in os.path.basename(name):
        name = name.rpartition(".")[0]
        if name in samples:
            return True
    return False


def _name(one: Found) -> str:
    return f"the sample {os.fsdecode(one.key)!r} in {one.where}"


def _read_text(content: bytes) -> str | Fault:
    try:
        return content.decode().strip()
    except UnicodeDecodeError:
        return Fault(f"expected UTF-8, found {content!r:.80}")


def _read_json(content: bytes) -> list[str | Fault]:
    """Returns [the label in a .json, or a Fault if it or the JSON is invalid]; [] if the .json has no label."""
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


def _by_word(src: Path, tars: list[str], samples: list[Found]) -> dict[str, list[Found]]:
    """Returns the samples by the word in SRC for their split; all by "" unless every sample has such a word."""
    told = {tar: _word_of_tar(src, tar) for tar in tars}
    if any(told.values()) and not all(told.values()):
        one, other = (next(tar for tar in tars if bool(told[tar]) == known) for known in (True, False))
        some = f"{split_name(told[one])!r} for {one!r} and none for {other!r}: {_WAY_OUT}"
        raise SourceError(f"{src}: expected a split in the name or folder of every tar, or of none, found {some}")
    words = [(told[one.where] or os.fsdecode(one.key).partition("/")[0]).lower() for one in samples]
    if not all(map(known_split, words)):
        return {"": samples}
    found: dict[str, list[Found]] = {}
    for word, sample in zip(words, samples, strict=True):
        found.setdefault(word, []).append(sample)
    return found


def _word_of_tar(src: Path, tar: str) -> str:
    """Returns the word for a split in a tar's path, such as "validation" for in1k-validation-07.tar; or ""."""
    *folders, name = tar.split("/")
    for words in (folders, re.findall("[a-z]+", name.lower())):
        found = {split: word for word in words if (split := known_split(word))}
        if len(found) > 1:
            both = " and ".join(sorted(found))
            raise SourceError(f"{src}: expected the name of one split in {tar!r}, found {both}: {_WAY_OUT}")
        if found:
            return found.popitem()[1]
    return ""
