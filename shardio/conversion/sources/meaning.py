"""What a layout of folders may mean, if its folders may be something else than classes. Reads no file itself.

Folders may be roles (images and their masks), splits in longer names, parts of one folder, or lie above the classes.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from shardio.conversion.sources.doubt import UNLABELED, Reading
from shardio.conversion.sources.listing import Found
from shardio.conversion.sources.names import known_split
from shardio.errors import first_of

# Words in the names of folders. Some classes of a collection may have such names, too, but not all.
_SPLIT = r"train(ing|val|set)?|val(id|idation|set)?|dev|test(ing|set)?|eval(uation)?|holdout|unlabell?ed|extra"
_IMAGES = r"(jpeg)?images?|imgs?|pictures?|rgb|hr|lr|frames?|stills?"
_MASKS = r"masks?|disp|flow|label(s|ed)?|annot(ation)?s?|seg(mentation)?s?|gt|(ground)?truth|trimaps?|depth|disparity"
_WITH_ROLES = (
    r"\d+|jpe?g|png|tiff?|class|object|fine|coarse|ground|bit|ids?|raw|orig(inal)?s?|color|binary|semantic|instance|full|"
    r"maps?|sets?|bicubic|x|t[rs]|dir|folder|(meta)?data|meta|info|occ|noc|obj|viz|docs?|lists?|box(es)?|xmls?|txt|json"
)
# These are roles only of folders that have the same names of files.
_PAIRED = (
    r"left|right|inputs?|outputs?|targets?|source|before|after|low|high|clean|nois[ey]|blur(red)?|sharp|hazy|visible|"
    r"infrared|thermal|n?ir|sketch(es)?|photos?|edges"
)
_PART = re.compile(
    r"(.*[\W_])?(part|chunk|batch|shard|archive|fold|images?|imgs?)[\W_]*\d+|[1-9]\d\d(?=.*[a-z])\w{5}",
    re.IGNORECASE | re.ASCII,
)
_DATE = re.compile(r"(19|20)\d\d([-_. ]?\d\d){0,2}", re.ASCII)
# 0, 0_100, image_0001: names that pictures of all classes may have.
_NUMBERED = re.compile(rb"([a-zA-Z]*)[\W_]*\d+([\W_]*\d+)*")
_MOST_WORDS = 3

# Hugging Face's imagefolder has metadata.csv, Roboflow _classes.csv.
_METADATA = re.compile(r"_?(metadata|classes|annotations?|labels?|captions?)\.(csv|tsv|jsonl|parquet)")
_NAME_OF_MASK = re.compile(rb"([\W_](masks?|labels?|gt|seg(mentation)?|depth))\.\w+", re.IGNORECASE)
_LEAST_MASKS, _SAMPLED = 0.1, 500
_MOST_PAIRED = 5
_ENOUGH_PAIRED = 0.9
_LOOKED_AT = 8
"""The number of pictures of a folder whose headers are read, if folders pair up."""


class Disk(NamedTuple):
    """What is asked of the disk, and only where names make it worth asking."""

    exists: Callable[[Path], bool]
    look: Callable[[Path], tuple[bool, tuple[int, int]] | None]
    """Returns whether a picture is gray or has a palette, and its size; None if its header cannot be read."""
    tables: Callable[[Path], Sequence[str]]
    """Returns the sorted names of the tables in a folder."""


@dataclass(frozen=True)
class Part:
    """The images in the folder of a split, or in SRC if SRC has no folders of splits."""

    path: Path
    split: str
    """The set's name for the split; "" if SRC has no folders of splits."""
    images: Sequence[bytes]
    """The names of the images directly in `path`."""
    classes: Mapping[str, Sequence[bytes]]
    """The paths, relative to `path`, of the images in and below each folder in `path`, by the folder's name."""

    @property
    def full(self) -> Sequence[str]:
        """The names of the folders of `classes` that have images."""
        return [name for name, paths in self.classes.items() if paths]

    def found(self, is_labeled: bool) -> Iterator[Found]:
        """Yields the images in class folders, labeled, or all images if `is_labeled` is false or no class has any."""
        is_labeled = is_labeled and bool(self.full)
        prefix, above = (os.fsencode(f"{name}/") if self.split else b"" for name in (self.split, self.path.name))
        for name, paths in ((None, [] if is_labeled else self.images), *self.classes.items()):
            for path in paths:
                yield Found(prefix + path, name if is_labeled else None, above + path if above != prefix else None)

    def stems(self, name: str) -> dict[bytes, bytes]:
        """Returns the paths in the folder `name`, by the part of the path after the folder and before the suffix."""
        start = len(os.fsencode(name)) + 1
        return {path[start:].rpartition(b".")[0] or path[start:]: path for path in self.classes[name]}

    def deepest(self) -> dict[str, list[bytes]]:
        """Returns the paths of the images in each folder that holds images, by the folder's path."""
        found: dict[bytes, list[bytes]] = {}
        for path in chain.from_iterable(self.classes.values()):
            found.setdefault(path[: path.rindex(b"/")], []).append(path)
        return {os.fsdecode(folder): paths for folder, paths in found.items()}

    def place(self, name: str) -> str:
        return f"{self.path.name}/{name}" if self.split else name


def _words(name: str) -> list[str]:
    """Returns the words and numbers in a folder's name, in lower case: div, 2, k, train, hr of DIV2K_train_HR."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_a-zA-Z]+", name)]


def _has(name: str, words: str) -> bool:
    """Whether one of the words in a folder's name is one of `words`, a regular expression."""
    return any(re.fullmatch(words, word) for word in _words(name))


def kind_of(name: str) -> str:
    """Returns what a folder's name says that it holds: "split", "part", "masks", "images", "lists", "pair", or ""."""
    if known_split(name) or _has(name, _SPLIT):
        return "split"
    if _PART.fullmatch(name):
        return "part"
    if not name.isdigit() and all(re.fullmatch(f"{_IMAGES}|{_MASKS}|{_WITH_ROLES}", word) for word in _words(name)):
        return "masks" if _has(name, _MASKS) else "images" if _has(name, _IMAGES) else "lists"
    return "pair" if _has(name, _PAIRED) or name in ("A", "B") else ""


def of_classes(names: Iterable[str]) -> Sequence[str]:
    """Returns the first two names that may be of classes, since they are of no role, split or part."""
    return list(islice((name for name in names if kind_of(name) in ("", "pair", "lists")), 2))


def are_no_classes(names: Sequence[str]) -> bool:
    """Whether all names (of three or more: all but one) are of roles, splits or parts."""
    few = len(names) > 1 and len(of_classes(names)) <= (len(names) > 2)
    return few and not {"", "pair", "lists"}.issuperset(map(kind_of, names))


def unwrapped(place: str, paths: Sequence[bytes]) -> tuple[str, Sequence[str]]:
    """Returns the folder at or below `place` that does not only hold one folder, and the folders with images in it.

    `paths` are the images of `place`, which is relative as they are.
    """
    while True:
        depth = place.count("/") + 1
        inner = sorted({os.fsdecode(path).split("/")[depth] for path in paths if path.count(b"/") > depth})
        if len(inner) != 1 or known_split(inner[0]) or any(path.count(b"/") == depth for path in paths):
            return place, inner
        place = f"{place}/{inner[0]}"


def _suffix(mask: bytes, stems: Collection[bytes]) -> bytes:
    """Returns what the name of a mask has after the longest name in `stems` with which it begins."""
    return next((mask[end:] for end in range(len(mask), 0, -1) if mask[:end] in stems), b"")


def _go_on(part: Part) -> bool:
    """Whether the pictures of each folder, which are numbered, go on where those of the folder before end."""
    last = -1
    for name in part.full:
        numbers = [re.fullmatch(rb"[^/]*/[a-zA-Z]*(\d+)\.\w+", path) for path in part.classes[name]]
        found = [int(one[1]) for one in numbers if one]
        if len(found) < len(numbers) or min(found) <= last:
            return False
        last = max(found)
    return True


class Layout:
    """The parts of a tree, and what they may mean."""

    def __init__(self, root: Path, parts: Sequence[Part], noun: str, disk: Disk, has_masks: bool = False) -> None:
        self.root, self.parts, self.noun, self.disk, self.has_masks = root, parts, noun, disk, has_masks
        self.labeled = [part for part in parts if part.full]
        self.first = self.labeled[0] if self.labeled else parts[0]
        self.names = list(self.first.classes) if self.labeled else []
        self.full = sorted({name for part in self.labeled for name in part.full})
        folders = {path[: path.rindex(b"/")] for path in chain.from_iterable(self.first.classes.values())}
        self.leaves = sorted(os.fsdecode(folder) for folder in folders if b"/" in folder)
        self.is_deep_only = len(self.leaves) == len(folders)

    @cached_property
    def others(self) -> str:
        """What all folders are by their names, if they are no classes: "splits", "parts" or "images and masks"."""
        if len(self.names) > 1:
            picture = self.first.path / os.fsdecode(self.first.classes[self.first.full[0]][0])
            sidecars = (self.root / "dataset.json", picture.with_suffix(".json"), picture.with_suffix(".txt"))
            are_numbered = all(re.fullmatch(r"([a-zA-Z]+_?)?\d{4,}", name) for name in self.names)
            is_band = re.search(r"_B\d[\dA]$", picture.stem)  # of a satellite's picture, which is a folder
            if is_band or self.are_dates or (are_numbered and any(map(self.disk.exists, sidecars))):
                return "parts"
            if are_numbered and _go_on(self.first):
                return "parts"
        names = [name for name in self.names if self.first.classes[name] or kind_of(name) != "lists"]
        kinds = set(map(kind_of, names)) if are_no_classes(names) else set()
        return "splits" if "split" in kinds else "parts" if "part" in kinds else "images and masks" if kinds else ""

    @cached_property
    def are_known(self) -> bool:
        """Whether no folder may be a class, by its name. But training_fake, training_real have own words."""
        known = f"{_SPLIT}|{_IMAGES}|{_MASKS}|{_WITH_ROLES}|.{{1,2}}"
        own = {" ".join(word for word in _words(name) if not re.fullmatch(known, word)) for name in self.first.full}
        if not self.others or (self.others == "splits" and "" not in own and len(own) == len(self.first.full)):
            return False
        are_numbers = all(map(str.isdigit, self.names)) and not self.are_dates
        return are_numbers or not of_classes(self.first.full)

    @cached_property
    def are_dates(self) -> bool:
        """Whether the names of folders differ in a year or a date alone, as those of photographs do."""
        return len(self.names) > 1 and len({_DATE.sub("", name, 1) for name in self.names}) == 1

    @cached_property
    def masks_among_images(self) -> Sequence[bytes]:
        """Masks in the same folders as their images, by their names, of a sample of the names."""
        paths = [*self.first.images, *chain.from_iterable(self.first.classes.values())]
        some = paths[:: -(-len(paths) // _SAMPLED) or 1]
        masks = [path for path in some if _NAME_OF_MASK.search(path)] or self._endings(sorted(paths)[:_SAMPLED])
        is_other = self.has_masks or self.others or self.gray or not _LEAST_MASKS * len(some) <= len(masks) < len(some)
        return () if is_other else masks

    def _endings(self, paths: Sequence[bytes]) -> list[bytes]:
        """Returns paths with the name of another picture and an ending that nearly all pictures have, such as _GT.

        Only those that are gray, while the other pictures are not.
        """
        by_stem = {path.rpartition(b".")[0]: path for path in paths}
        base: dict[bytes, tuple[bytes, bytes]] = {}
        for stem, path in by_stem.items():
            ends = [match.start() for match in re.finditer(rb"[\W_](?=[^/]*[a-zA-Z][^/]*$)", stem)]
            if (end := next((end for end in reversed(ends) if stem[:end] in by_stem), 0)) and b"/" not in stem[end:]:
                base[path] = (by_stem[stem[:end]], stem[end:])
        most = Counter(ending for _, ending in base.values())
        common = {one for one, count in most.items() if count >= _ENOUGH_PAIRED * (len(paths) - len(base))}
        found = [path for path, (_, ending) in base.items() if ending in common]
        for path in found[:_LOOKED_AT]:
            looks = [self.disk.look(self.first.path / os.fsdecode(one)) for one in (path, base[path][0])]
            if [look and look[0] for look in looks] != [True, False]:
                return []
        return found

    @cached_property
    def are_above_classes(self) -> bool:
        """Whether the folders hold only folders, and the names of these look like names of classes or splits."""
        if len(self.full) == 1:
            return bool(unwrapped(self.full[0], self.first.classes.get(self.full[0], ()))[1])
        inner = {tuple(leaf.split("/")[:2]) for leaf in self.leaves}
        names = {name for _, name in inner}
        repeats = any(len(above) > 2 and above in name for above, name in inner)
        are_own = len(names) == len(inner) > len(self.full) and not repeats
        return self.is_deep_only and are_own

    @cached_property
    def gray(self) -> Mapping[str, Sequence[str]]:
        """The gray folders of each part whose folders pair up, by the part's split."""
        return {part.split: gray for part in self.labeled if (gray := self._gray_of_pairs(part)) is not None}

    @cached_property
    def metadata(self) -> Sequence[tuple[Part, str]]:
        """Each part with a table next to its images that describes them by its name, and the table's name."""
        flat = (part for part in self.parts if part.images or len(part.full) == 1)
        return [(part, name) for part in flat for name in self.disk.tables(part.path) if _METADATA.fullmatch(name)]

    def doubts(self) -> Iterator[str]:
        """Yields a description of every ambiguity in the layout."""
        noun, full = self.noun, self.full
        for part in self.parts:
            if part.images and part.full:
                found = f"{len(part.images):,} directly in it, and folders with {noun} such as {part.full[0]!r}"
                yield f"expected {noun} directly in {str(part.path)!r} or in its folders, found {found}"
            elif not part.images and not part.full:
                yield f"expected {noun} in {str(part.path)!r}, found none: the split would be left out"
        if (flat := [part for part in self.parts if part.images and not part.full]) and self.labeled:
            expected = f"class folders in {flat[0].path.name!r}, as in {self.first.path.name!r}"
            yield f"expected {expected}, found {len(flat[0].images):,} {noun} without class folders"
        splits = [name for name in self.names if known_split(name)]
        if self.others:
            way = " (rename splits to train, val or test)" if self.others == "splits" else ""
            yield f"expected names of classes, found names of {self.others}: {first_of(self.names, 4, repr)}{way}"
        elif len(set(map(known_split, splits))) > 1:  # one class may have such a name: many collections have trains
            listed = ", ".join(map(repr, splits))
            yield f"expected names of classes, found names of splits ({listed}), which would become classes"
        elif len(full) == 1:
            yield f"expected at least two classes, found only {full[0]!r}"
        elif self.leaves:
            deep = str(self.first.path / self.leaves[0])
            way = " (`--table` takes a list of images and classes)" if self.are_above_classes else ""
            yield f"expected {noun} directly in the class folders, found some deeper, in {deep!r}{way}"
        if self.gray and not self.others:
            yield f"expected {noun} of other names in each class folder, found the same in {first_of(full, 5, repr)}"
        if masks := self.masks_among_images:
            yield f"expected {noun} alone, found masks among them, such as {os.fsdecode(masks[0])!r}"
        if self.metadata:
            part, name = self.metadata[0]
            yield f"expected only {noun} in {str(part.path)!r}, found {name!r} next to them"

    def readings(self) -> Iterator[Reading]:
        """Yields what the layout may mean, and the command for each meaning."""
        masks = [found for part in self.labeled for found in self._masks(part)][:2]
        if self.labeled and not self.are_known and not self.are_above_classes:
            where = f"in {self.first.path.name} " if self.first.split else ""
            where = "in each split " if len(self.labeled) > 1 else where
            several = f"{'the' if where else 'these'} {len(self.names)} folders {where}are classes"
            one = f"{self.names[0]} is the only class"
            yield Reading(one if len(self.names) == 1 else several, {"--labels": "folders"})
        leaves = [os.path.basename(leaf) for leaf in self.leaves]
        are_clear = len(set(leaves)) == len(leaves) >= 1 or len(leaves) >= 2 * len(set(leaves)) > 2
        if are_clear and not self.others and len(self.full) > 1 < len(of_classes(set(leaves))):
            yield Reading("the deepest folders are classes", {"--labels": "leaf"})
        if self.metadata:
            tables = tuple(f"{one.split}={one.path / name}".lstrip("=") for one, name in self.metadata)
            yield Reading(f"{self.metadata[0][1]} lists the images", {"--table": tables, "--labels": None})
        if (ending := self._ending()) is not None:
            options = {"--masks": str(self.root), "--mask-suffix": ending}
            yield Reading(f"names that end with {ending.rpartition('=')[2]} are masks", options)
        for part, mask, name, suffix in masks:
            meaning = f"{part.place(mask)} holds the masks of {part.place(name)}"
            given = {"--masks": str(part.path / mask), "--mask-suffix": suffix or None, "--labels": None}
            yield Reading(meaning, given, part.path / name)
        yield from self._right_folders({mask for _, mask, _, _ in masks})
        if self.others == "splits" and not self.first.split:
            yield Reading("all are of one split, without labels", {"--labels": "none"})
        elif self.others != "images and masks" and not self.gray:
            beside = self.disk.tables(self.root) if self.others == "parts" else ()
            yield from (Reading(f"{name} lists the images", {"--table": str(self.root / name)}) for name in beside[:1])
            are_all = Reading("all files are pictures, without labels", UNLABELED.options)
            yield are_all if self.masks_among_images else UNLABELED

    def _ending(self) -> str | None:
        """Returns the `--mask-suffix` of masks that lie among their images; None if there are none, or no image."""
        found = _NAME_OF_MASK.search(next(iter(self.masks_among_images), b""))
        if found is None:
            return None
        new, base = found[1], found.string[: found.start()]
        paths = chain(self.first.images, *self.first.classes.values())
        rest = {path.rpartition(b".")[0][len(base) :] for path in paths if path.startswith(base)} - {new}
        old = min((one for one in rest if re.fullmatch(rb"([\W_][a-zA-Z]+)?", one)), default=None)
        return None if old is None else os.fsdecode(old + b"=" * bool(old) + new)

    def _right_folders(self, masks: Collection[str]) -> Iterator[Reading]:
        """Yields readings with another SRC, if SRC is a folder too high, or its folders are no classes."""
        first, pictures = self.first, [name for name in self.first.full if name not in masks]
        names = [name for name in pictures if kind_of(name) in ("split", "images")]
        names.sort(key=lambda name: "train" not in name.lower())
        if not self.others:
            names = pictures[:1] if self.gray or (len(self.full) == 1 and self.are_above_classes) else []
        for name in names[:2]:
            place, inner = unwrapped(name, first.classes[name])
            src, where = first.path / place, first.place(place)
            if inner:
                is_high = are_no_classes(inner) or any(map(known_split, inner))
                meaning = (
                    f"{where} is the collection" if is_high else f"the {len(inner)} folders in {where} are classes"
                )
                yield Reading(meaning, {"--labels": None}, src)
                continue
            split = next((word for word in _words(name) if re.fullmatch(_SPLIT, word)), "")
            tables = self.disk.tables(self.root) if self.others == "splits" else ()
            if table := next((one for one in tables if split in _words(one) and not _has(one, _MASKS)), ""):
                yield Reading(f"{table} lists the images", {"--table": str(self.root / table)}, src)
            else:
                yield Reading(f"no image in {where} has a label", {"--labels": "none"}, src)

    def _masks(self, part: Part) -> Iterator[tuple[Part, str, str, str]]:
        """Yields (part, folder of masks, folder of their images, what the masks' names have after their images')."""
        if not self.gray and self.others not in ("images and masks", "splits"):
            return
        gray = self.gray.get(part.split, ())
        masks = [name for name in part.full if name in gray or _has(name, _MASKS)]
        stems = {name: part.stems(name).keys() for name in part.full}
        for mask in masks:
            for name in [name for name in stems if name not in masks]:
                suffix = _suffix(next(iter(stems[mask])), stems[name])
                paired = {stem.removesuffix(suffix) for stem in stems[mask] if stem.endswith(suffix)} & stems[name]
                if len(paired) >= _ENOUGH_PAIRED * len(stems[mask]):
                    yield part, mask, name, os.fsdecode(suffix)
                    break

    def _gray_of_pairs(self, part: Part) -> Sequence[str] | None:
        """Returns the gray folders of a part whose folders pair up; None if the folders of `part` do not pair up.

        The same names of files are not enough. Numbers, also after a common word, are names that all classes may have.
        """
        if self.others == "parts" or not 2 <= len(part.full) <= _MOST_PAIRED:
            return None
        stems = {name: part.stems(name) for name in part.full}
        most = max(stems.values(), key=len).keys()
        shared = sorted(set.intersection(*map(set, stems.values())))
        if not shared or any(len(some.keys() & most) < _ENOUGH_PAIRED * len(some) for some in stems.values()):
            return None
        chosen = shared[:: -(-len(shared) // _LOOKED_AT)]
        looks = {
            name: [self.disk.look(part.path / os.fsdecode(some[stem])) for stem in chosen]
            for name, some in stems.items()
        }
        are_gray = {name: {one[0] if one else None for one in seen} for name, seen in looks.items()}
        gray = [name for name, found in are_gray.items() if found == {True}]
        if 0 < len(gray) < len(stems) and all(found == {False} for name, found in are_gray.items() if name not in gray):
            return gray
        paired = [kind_of(name) in ("images", "masks", "pair") for name in stems]
        numbers = [_NUMBERED.fullmatch(stem.rpartition(b"/")[2]) for stem in shared]
        words = {one[1] for one in numbers if one}
        are_numbers = all(numbers) and len(words) <= min(_MOST_WORDS, (len(shared) + 1) // 2)
        suffixes = [{path.rpartition(b".")[2].lower() for path in some.values()} for some in stems.values()]
        differ = all(len(some) == 1 for some in suffixes) and len(set.union(*suffixes)) > 1
        if all(paired) or (not are_numbers and (any(paired) or differ or _have_sizes_of_pairs(list(looks.values())))):
            return ()
        return None


def _have_sizes_of_pairs(looks: Sequence[Sequence[tuple[bool, tuple[int, int]] | None]]) -> bool:
    """Whether the pictures of each pair have the same size or ratio of sizes, and those of a folder do not."""
    sizes = [[one[1] for one in seen if one] for seen in looks]
    first = sizes[0]
    if len(set(first)) < 2 or any(len(some) != len(first) for some in sizes):
        return False
    return all(
        len({(round(a / c, 1), round(b / d, 1)) for (a, b), (c, d) in zip(some, first, strict=True)}) == 1
        for some in sizes
    )
