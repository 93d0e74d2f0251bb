"""Finds out what folders may mean other than classes: images and their masks, splits with longer names, parts into
which one collection was divided, or folders above the class folders. Reads no file itself."""

from __future__ import annotations

import os
import re
from bisect import bisect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from shardio.conversion.sources.doubt import UNLABELED, Reading
from shardio.conversion.sources.listing import Found
from shardio.conversion.sources.names import DEFAULT_SPLIT, known_split
from shardio.errors import first_of

# Words in the names of folders. Some classes of a collection may have such names, too, but not all.
_SPLIT = r"train(ing|val|set)?|val(id|idation|set)?|dev|test(ing|set)?|eval(uation)?|holdout|unlabell?ed|extra"
_IMAGES = r"(jpeg)?images?|imgs?|pictures?|rgb|hr|lr|frames?|stills?"
_MASKS = (
    r"masks?|disp|flow|label(s|ed)?|annot(ation)?s?|seg(mentation)?s?|gt|(ground)?truth|(tri)?maps?|depth|disparity"
)
_WITH_ROLES = (
    r"\d+|jpe?g|png|tiff?|class|object|fine|coarse|ground|bit|ids?|raw|orig(inal)?s?|color|binary|semantic|instance|full|"
    r"sets?|bicubic|x|t[rs]|dir|folder|(meta)?data|meta|info|occ|noc|obj|viz|docs?|lists?|box(es)?|xmls?|txt|json|left|right"
)
# These are roles only of folders that have the same names of files.
_PAIRED = (
    r"left|right|inputs?|outputs?|targets?|source|before|after|low|high|clean|nois[ey]|blur(red)?|sharp|hazy|visible|"
    r"infrared|thermal|n?ir|sketch(es)?|photos?|edges"
)
_PART = re.compile(
    r"(.*[\W_])?(part|chunk|batch|shard|archive|fold|images?|imgs?)([\W_]*\d+|[\W_]+[a-z])|[1-9]\d\d(?=.*[a-z])\w{5}",
    re.IGNORECASE | re.ASCII,
)
_DATE = re.compile(r"(19|20)\d\d([-_. ]?\d\d){0,2}", re.ASCII)
# 0, 0_100, image_0001: names that pictures of all classes may have.
_NUMBERED = re.compile(rb"([a-zA-Z]*)[\W_]*\d+([\W_]*\d+)*")
_MOST_WORDS = 3
# One class may be called train, as the vehicle is, but none has these names.
_STRAY = re.compile(r"val(id|idation)?|dev|test(ing|set)?|holdout|unlabell?ed", re.IGNORECASE)

# Hugging Face's imagefolder has metadata.csv, Roboflow _classes.csv, FairFace fairface_label_train.csv.
_DESCRIBES = "metadata|annotations?|labels?|captions?|parquet"
TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
_NAME_OF_MASK = re.compile(rb"([\W_](masks?|labels?|gt|seg(mentation)?|depth))\.\w+", re.IGNORECASE)
_LEAST_MASKS, _SAMPLED = 0.1, 500
_MOST_PAIRED, _ENOUGH_PAIRED = 5, 0.9
_LOOKED_AT = 8  # pictures of a folder whose headers are read, if folders pair up


class Disk(NamedTuple):
    """Functions with which a Layout looks at files, where the names of folders alone do not decide."""

    exists: Callable[[Path], bool]
    look: Callable[[Path], tuple[bool, tuple[int, int]] | None]
    """Returns (whether a picture is gray or has a palette, its (width, height)); None for an unreadable header."""
    tables: Callable[[Path], Sequence[str]]
    """Returns the sorted names of the tables in a folder."""
    has_splits: Callable[[Path], bool]
    """Whether a table has a column of splits."""


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
        """Yields the images in class folders, labeled; or all images, unlabeled, if not `is_labeled` or no class has
        images."""
        is_labeled = is_labeled and bool(self.full)
        prefix, above = (os.fsencode(f"{name}/") if self.split else b"" for name in (self.split, self.path.name))
        for name, paths in ((None, [] if is_labeled else self.images), *self.classes.items()):
            for path in paths:
                yield Found(prefix + path, name if is_labeled else None, above + path if above != prefix else None)

    def stems(self, name: str) -> dict[bytes, bytes]:
        """Returns the paths of the images in the folder `name`, by the path below that folder without suffix."""
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


def has_word(name: str, words: str) -> bool:
    """Whether one of the words in a folder's name is one of `words`, a regular expression."""
    return any(re.fullmatch(words, word) for word in _words(name))


def split_in(name: str) -> str:
    """Returns the split that a word in a file's name names; "" if there is none."""
    return next(filter(None, map(known_split, _words(name))), "")


def describes(name: str) -> bool:
    """Whether a file describes the images next to it, by its name. classes.txt has only names of classes."""
    return has_word(name, _DESCRIBES + "|classes" * name.endswith(TABLES)) or split_in(name) in ("train", "val")


def are_clear(leaves: Sequence[str]) -> bool:
    """Whether names of the deepest folders may be classes: all differ, or each patient or domain has the same ones."""
    names, depths = set(map(os.path.basename, leaves)), {leaf.count("/") for leaf in leaves}
    return len(names) == len(leaves) or (len(leaves) >= 2 * len(names) and len(depths) == 1)


def kind_of(name: str) -> str:
    """Returns what a folder holds, by its name: "split", "masks", "images", "part" (of a collection divided into
    folders such as part_03), "lists" (annotations), "pair" (one side of pairs of pictures: "before"); otherwise ""."""
    if known_split(name) or has_word(name, _SPLIT):
        return "split"
    if _PART.fullmatch(name):
        return "part"
    known = re.compile(f"{_IMAGES}|{_MASKS}|{_WITH_ROLES}")
    has_role = not name.isdigit() and all(map(known.fullmatch, _words(name)))
    if has_role and (has_word(name, _MASKS) or has_word(name, _IMAGES)):
        return "masks" if has_word(name, _MASKS) else "images"
    return "pair" if has_word(name, _PAIRED) or name in ("A", "B") else "lists" if has_role else ""


def unwrapped(place: str, paths: Sequence[bytes]) -> tuple[str, Sequence[str]]:
    """Goes down from the folder `place` while it holds one folder alone, which is not a split. Returns (the folder
    reached, the names of its folders). `place` and the `paths` of images below it are relative to the same folder."""
    while True:
        depth = place.count("/") + 1
        inner = sorted({os.fsdecode(path).split("/")[depth] for path in paths if path.count(b"/") > depth})
        if len(inner) != 1 or known_split(inner[0]) or any(path.count(b"/") == depth for path in paths):
            return place, inner
        place = f"{place}/{inner[0]}"


def _endings(masks: Sequence[bytes], images: Iterable[bytes]) -> tuple[str, str] | None:
    """Returns (ending of images' names, ending of masks' names), such as ("_rgb", "_gt"), if at least 90% of the masks
    have an image of the same name but for the ending; otherwise None. Names are without file suffixes."""
    ordered, mask = sorted(images), masks[0]
    at = bisect(ordered, mask)
    near = ordered[max(at - 1, 0) : at + 1]
    begins = [(end, image) for image in near for end in range(len(mask) + 1) if image.startswith(mask[:end])]
    common, image = max(begins, default=(0, b""))
    if common < len(image):
        common = len(mask[:common].rstrip(b"_-. "))
    old, new = image[common:], mask[common:]
    found = {one.removesuffix(new) + old for one in masks if one.endswith(new)}
    is_paired = common and len(found.intersection(ordered)) >= _ENOUGH_PAIRED * len(masks)
    return (os.fsdecode(old), os.fsdecode(new)) if is_paired else None


def _go_on(part: Part) -> bool:
    """Whether pictures are numbered, and each folder of the part continues the numbers of the folder before it."""
    last = -1
    for name in part.full:
        numbers = (re.fullmatch(rb"[^/]*/[a-zA-Z]*(\d+)\.\w+", path) for path in part.classes[name])
        found = [int(one[1]) for one in numbers if one]
        if len(found) < len(part.classes[name]) or min(found) <= last:
            return False
        last = max(found)
    return True


class Layout:
    """What the folders of a tree may mean: see `doubts` and `readings`. `parts` are the folders of splits, `noun` is
    "images" or "arrays", and `has_masks` is from `list_tree`."""

    def __init__(self, root: Path, parts: Sequence[Part], noun: str, disk: Disk, has_masks: bool = False) -> None:
        self.root, self.parts, self.noun, self.disk, self.has_masks = root, parts, noun, disk, has_masks
        self.labeled = [part for part in parts if part.full]
        self.first = self.labeled[0] if self.labeled else parts[0]
        self.names = list(self.first.classes) if self.labeled else []
        self.full = sorted({name for part in self.labeled for name in part.full})
        self.paths = [*self.first.images, *chain.from_iterable(self.first.classes.values())]
        folders = {path.rpartition(b"/")[0] for path in self.paths}
        self.leaves = sorted(os.fsdecode(folder) for folder in folders if b"/" in folder)
        self.is_deep_only = len(self.leaves) == len(folders)

    @cached_property
    def others(self) -> str:
        """What all folders seem to be: "splits", "parts", "dates" or "images and masks"; "" if none of these."""
        names = [name for name in self.names if self.first.classes[name] or kind_of(name) != "lists"]
        if len(names) < 2:
            return ""
        if len({_DATE.sub("", name, 1) for name in self.names}) == 1:
            return "dates"
        picture = self.first.path / os.fsdecode(self.first.classes[self.first.full[0]][0])
        sidecars = (self.root / "dataset.json", picture.with_suffix(".json"), picture.with_suffix(".txt"))
        are_numbered = all(re.fullmatch(r"([a-zA-Z]+_?)?\d{4,}", name) for name in self.names)
        is_band = re.search(r"_B\d[\dA]$", picture.stem)  # of a satellite's picture, which is a folder
        if is_band or (are_numbered and (_go_on(self.first) or any(map(self.disk.exists, sidecars)))):
            return "parts"
        are_splits = len({known_split(name) for name in names} - {""}) > 1
        # Of three or more classes, all but one may have such names.
        classes = islice((name for name in names if kind_of(name) in ("", "pair", "lists")), 2)
        if not are_splits and len(list(classes)) > (len(names) > 2):
            return ""
        kinds = set(map(kind_of, names))
        if are_splits or "split" in kinds:
            return "splits"
        return "images and masks" if kinds & {"masks", "images"} else "parts" if "part" in kinds else ""

    @cached_property
    def may_be_classes(self) -> bool:
        """Whether the folders may be classes. A folder named for a split or for masks may be one if its name has other
        words, too, such as training_fake."""
        if self.others in ("", "dates"):
            kinds = set(map(kind_of, self.full)) if self.gray or len(self.full) == 1 else {""}
            are_roles = kinds <= {"images", "masks", "pair"} and kinds != {"pair"}
            return bool(self.labeled) and not self.are_above_classes and not are_roles
        known = f"{_SPLIT}|{_IMAGES}|{_MASKS}|{_WITH_ROLES}|.{{1,2}}"
        own = {" ".join(word for word in _words(name) if not re.fullmatch(known, word)) for name in self.first.full}
        are_own = "" not in own and len(own) == len(self.first.full)
        are_lettered = all(re.search(r"[\W_][a-zA-Z]$", name) for name in self.first.full)  # part_a, or a class
        may_be = self.others != "parts" and (are_own or any(kind_of(name) in ("", "pair") for name in self.first.full))
        return may_be or are_lettered

    @cached_property
    def are_above_classes(self) -> bool:
        """Whether the folders hold only folders whose own names look like names of classes or splits."""
        if len(self.full) == 1:
            return bool(unwrapped(self.full[0], self.first.classes.get(self.full[0], ()))[1])
        inner = [leaf.split("/") for leaf in self.leaves]
        while inner and len({one[1] for one in inner}) == 1 and all(len(one) > 2 for one in inner):
            inner = [[one[0], *one[2:]] for one in inner]
        pairs = {(one[0], one[1]) for one in inner}
        names = {name for _, name in pairs}
        if not self.is_deep_only or len(names) < 2:
            return False
        if len(names) == len(pairs):
            return len(names) > len(self.full) and not any(len(above) > 2 and above in name for above, name in pairs)
        # Each patient or each domain may have a folder of each class.
        is_last = all(len(one) == 2 for one in inner) and len(pairs) >= 2 * len(names)
        are_words = not re.search(r"\d", "".join(names))
        are_classes = are_words or (names == {"0", "1"} and all(re.search(r"\d", above) for above in self.full))
        return is_last and are_classes and not any(map(kind_of, names))

    @cached_property
    def has_splits_inside(self) -> bool:
        """Whether folders of splits, other than train alone, are in the folders, as in CLASS/test."""
        inside = {known_split(name) for leaf in self.leaves for name in leaf.split("/")[1:]}
        return len(self.full) > 1 and not self.others and bool(inside - {"", DEFAULT_SPLIT})

    @cached_property
    def masks_among_images(self) -> Sequence[bytes]:
        """The paths of some masks next to their images, known by their names or because they are gray; () if fewer than
        a tenth of the images in SRC are such masks."""
        paths = [] if self.has_masks or self.others or self.gray else self.paths
        some = paths[:: -(-len(paths) // _SAMPLED) or 1]
        masks = [path for path in some if _NAME_OF_MASK.search(path)]
        stems = {path.rpartition(b".")[0]: path for path in paths[:_SAMPLED]}
        base = b"/"
        for stem in () if masks else sorted(stems):
            if stem.startswith(base) and re.fullmatch(rb"[\W_][^/]*[a-zA-Z][^/]*", stem[len(base) :]):
                masks.append(stems[stem])
                looks = [self.disk.look(self.first.path / os.fsdecode(stems[one])) for one in (stem, base)]
                if [look and look[0] for look in looks] != [True, False]:
                    return ()
            else:
                base = stem
        return masks if _LEAST_MASKS * len(some) <= len(masks) < len(some) else ()

    @cached_property
    def gray(self) -> Mapping[str, Sequence[str]]:
        """The result of `_gray_of_pairs` for each split whose folders pair up, by the split's name."""
        return {part.split: gray for part in self.labeled if (gray := self._gray_of_pairs(part)) is not None}

    @cached_property
    def metadata(self) -> Sequence[tuple[str, Path]]:
        """(split, path) of each table that, by its name, describes the images next to it, or has the splits of class
        folders. "" stands for all splits."""
        flat = [(part.split, part.path) for part in self.parts if part.images or len(part.full) == 1]
        if not self.labeled and self.first.split == DEFAULT_SPLIT and not self.masks_among_images:
            flat.append(("", self.root))
        stems = {os.path.splitext(os.fsdecode(image))[0] for part in self.parts for image in part.images}
        tables = [(split, at / name) for split, at in flat for name in self.disk.tables(at)]
        tables = [one for one in tables if describes(one[1].name) and one[1].stem not in stems]
        tables.sort(key=lambda one: not one[1].name.endswith(TABLES))  # the first of a split counts
        named = {split or split_in(one.name): one for split, one in reversed(tables)}
        if not flat and not self.first.split and not self.others:
            paths = [self.root / name for name in reversed(self.disk.tables(self.root))]
            named = {split_in(one.name): one for one in paths if split_in(one.name) or self.disk.has_splits(one)}
            named = named if named.keys() - {DEFAULT_SPLIT} else {}
        return [one for one in sorted(named.items()) if one[0] or len(named) == 1]

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
        if self.others:
            way = " (rename splits to train, val or test)" if self.others == "splits" else ""
            yield f"expected names of classes, found names of {self.others}: {first_of(self.names, 4, repr)}{way}"
        elif len(full) > 1 and (strays := list(filter(_STRAY.fullmatch, full))):
            yield f"expected names of classes, found {strays[0]!r}, the name of a split, among them"
        elif len(full) == 1:
            yield f"expected at least two classes, found only {full[0]!r}"
        elif self.leaves:
            deep = str(self.first.path / self.leaves[0])
            way = " (`--table` takes a list of images and classes)" if self.are_above_classes else ""
            way = " (`--table` takes a list of images, classes and splits)" if self.has_splits_inside else way
            last = {os.path.basename(leaf): leaf for leaf in self.leaves}
            if twin := next((leaf for leaf in self.leaves if last[os.path.basename(leaf)] != leaf), ""):
                way += f"; {twin!r} and {last[os.path.basename(twin)]!r} have the same name"
            yield f"expected {noun} directly in the class folders, found some deeper, in {deep!r}{way}"
        if self.gray and not self.others:
            yield f"expected {noun} of other names in each class folder, found the same in {first_of(full, 5, repr)}"
        if odd := next((name for part in self.parts for name in part.images if b"\\" in name), b""):
            way = "convert the zip itself, or unpack it by `unzip`, which makes folders"
            yield f"expected names without backslashes, found {os.fsdecode(odd)!r}: {way}"
        if masks := self.masks_among_images:
            yield f"expected {noun} alone, found masks among them, such as {os.fsdecode(masks[0])!r}"
        for _, table in self.metadata[:1]:
            yield f"expected only {noun} in {str(table.parent)!r}, found {table.name!r} next to them"

    def readings(self) -> Iterator[Reading]:
        """Yields what the layout may mean, and the command for each meaning."""
        if self.may_be_classes and not self.has_splits_inside:
            count, where = len(self.names), "each split" if len(self.labeled) > 1 else self.first.path.name
            several = f"the {count} folders in {where}" if self.first.split else f"these {count} folders"
            meaning = f"{self.names[0]} is the only class" if count == 1 else f"{several} are classes"
            yield Reading(meaning + ", all files pictures" * bool(self.masks_among_images), {"--labels": "folders"})
        leaves = list(map(os.path.basename, self.leaves))
        names = {name for name in leaves if kind_of(name) in ("", "pair", "lists")}
        may_be = are_clear(self.leaves) and not self.others and not self.has_splits_inside
        if may_be and len(self.full) > 1 < len(names):
            many = "" if len(names) == len(leaves) else f"{len(names)} "  # fewer than folders
            yield Reading(f"the deepest folders are {many}classes", {"--labels": "leaf"})
        # A table of val alone would leave out the images of train that are in class folders.
        has_train = any(split in ("", DEFAULT_SPLIT) for split, _ in self.metadata)
        if has_train or (self.metadata and (self.first.split or not self.labeled)):
            tables = tuple(f"{split}={table}".lstrip("=") for split, table in self.metadata)
            yield Reading(f"{self.metadata[0][1].name} lists the images", {"--table": tables, "--labels": None})
        if among := self.masks_among_images:
            rest = set(self.paths).difference(among)
            old, new = _endings(*([path.rpartition(b".")[0] for path in some] for some in (among, rest))) or ("", "")
            if new:
                options = {"--masks": str(self.root), "--mask-suffix": f"{old}={new}".lstrip("=")}
                yield Reading(f"names that end with {new} are masks", options)
        masks = [list(self._masks(part)) for part in self.parts]
        if self.first.split and (common := [one for one in masks[0] if all(one in some for some in masks)]):
            for mask, name, old, new in common[:2]:
                suffix = f"{name}/{old}={mask}/{new}"
                whole = {"--masks": str(self.root), "--mask-suffix": suffix, "--labels": "none"}
                yield Reading(f"{mask} holds the masks of {name} in each split", whole)
        else:
            pairs = [(part, *one) for part, some in zip(self.parts, masks, strict=True) for one in some]
            for part, mask, name, old, new in pairs[:2]:
                ending = f"{old}={new}".lstrip("=") or None
                given = {"--masks": str(part.path / mask), "--mask-suffix": ending, "--labels": "none"}
                yield Reading(f"{part.place(mask)} holds the masks of {part.place(name)}", given, part.path / name)
        alone = {"--masks": None, "--mask-suffix": None} if self.has_masks else {}
        for one in self._right_folders({mask for some in masks for mask, *_ in some}):
            yield one._replace(options={**one.options, **alone})
        if (self.others == "splits" or self.has_splits_inside) and not self.first.split:
            yield Reading("all are of one split, without labels", {"--labels": "none"})
        elif self.others != "images and masks" and not self.gray:
            beside = self.disk.tables(self.root) if self.others else ()
            yield from (Reading(f"{name} lists the images", {"--table": str(self.root / name)}) for name in beside[:1])
            yield Reading("all files are pictures, without labels", UNLABELED.options) if among else UNLABELED

    def _right_folders(self, masks: Collection[str]) -> Iterator[Reading]:
        """Yields the readings in which a folder inside SRC is the right SRC. `masks` are the folders of masks."""
        first, pictures = self.first, [name for name in self.first.full if name not in masks]
        names = [name for name in pictures if kind_of(name) in ("split", "images", *["part"] * bool(masks))]
        names.sort(key=lambda name: "train" not in name.lower())
        if not self.others:
            names = pictures[:1] if self.gray or (len(self.full) == 1 and self.are_above_classes) else []
        for name in names[:2]:
            place, inner = unwrapped(name, first.classes[name])
            src, where = first.path / place, first.place(place)
            if inner:
                classes = f"the {len(inner)} folders in {where} are classes"
                meaning = f"{where} is the collection" if any(map(kind_of, inner)) else classes
                yield Reading(meaning, {"--labels": None}, src)
                continue
            split = next((word for word in _words(name) if re.fullmatch(_SPLIT, word)), "")
            tables = self.disk.tables(self.root) if self.others == "splits" else ()
            if table := next((one for one in tables if split in _words(one) and not has_word(one, _MASKS)), ""):
                yield Reading(f"{table} lists the images", {"--table": str(self.root / table)}, src)
            else:
                yield Reading(f"no image in {where} has a label", {"--labels": "none"}, src)

    def _masks(self, part: Part) -> Iterator[tuple[str, str, str, str]]:
        """Yields (folder of masks, folder of their images, ending of an image's name, ending of its mask's name)."""
        may_be = bool(self.gray) or self.others in ("images and masks", "splits")
        gray = self.gray.get(part.split, ())
        masks = [name for name in part.full if may_be and (name in gray or has_word(name, _MASKS))]
        stems = {name: list(part.stems(name)) for name in part.full if masks}
        names = sorted(part.full, key=lambda name: kind_of(name) != "images")
        for mask in masks:
            ways = ((name, _endings(stems[mask], stems[name])) for name in names if name not in masks)
            yield from islice(((mask, name, *endings) for name, endings in ways if endings), 1)

    def _gray_of_pairs(self, part: Part) -> Sequence[str] | None:
        """Returns the folders of gray pictures if the folders pair up: they have the same pictures in several forms,
        such as photos and masks. Otherwise None. The same names of files are not enough: pictures of all classes may be
        numbered, also after a common word."""
        if self.others in ("parts", "dates") or not 2 <= len(part.full) <= _MOST_PAIRED:
            return None
        stems = {name: part.stems(name) for name in part.full}
        most = max(stems.values(), key=len).keys()
        shared = sorted(set.intersection(*map(set, stems.values())))
        if not shared or any(len(some.keys() & most) < _ENOUGH_PAIRED * len(some) for some in stems.values()):
            return None
        chosen = shared[:: -(-len(shared) // _LOOKED_AT)]
        looks = [[self.disk.look(part.path / os.fsdecode(some[stem])) for stem in chosen] for some in stems.values()]
        kinds = [{one is not None and one[0] for one in seen} for seen in looks]
        if all(len(found) == 1 for found in kinds) and len(set(map(min, kinds))) == 2:
            return [name for name, found in zip(stems, kinds, strict=True) if found == {True}]
        has_role = [kind_of(name) in ("images", "masks", "pair") for name in stems]
        numbers = [_NUMBERED.fullmatch(stem.rpartition(b"/")[2]) for stem in shared]
        words = {one[1] for one in numbers if one}
        are_numbers = all(numbers) and len(words) <= min(_MOST_WORDS, (len(shared) + 1) // 2)
        suffixes = [{path.rpartition(b".")[2].lower() for path in some.values()} for some in stems.values()]
        differ = all(len(some) == 1 for some in suffixes) and len(set.union(*suffixes)) > 1
        have_sizes = len(set(looks[0])) > 1 and all(seen == looks[0] for seen in looks)
        return () if all(has_role) or (not are_numbers and (any(has_role) or differ or have_sizes)) else None
