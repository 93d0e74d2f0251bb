"""Lists the images in a table, or adds the labels, splits and numbers of tables to the images of another SRC.

An error counts all invalid rows and shows ten, not only the first, so a table can be corrected in one go.
"""

from __future__ import annotations

import contextlib
import os
import stat
import unicodedata
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, takewhile
from pathlib import Path

from shardio.conversion.arrays import Label
from shardio.conversion.images.headers import has_image_suffix
from shardio.conversion.options import EmptyClasses, Labels
from shardio.conversion.sources.cells import read_column, read_labels
from shardio.conversion.sources.collection import Collection, ColumnTable, Fault, FileOrigin, Source
from shardio.conversion.sources.doubt import DoubtError
from shardio.conversion.sources.listing import Found, Listing
from shardio.conversion.sources.names import DEFAULT_SPLIT, Outside, clutter, in_split_order, known_split, split_name
from shardio.conversion.sources.table import WITHOUT_SPLITS, Contents, Row, Table, column_reading, read_table
from shardio.errors import SourceError, counted


@dataclass
class _Rows(Listing):
    """The Listing of images that tables describe. An image's `where` is its Row; None if no table has the image."""

    tables: Sequence[Contents] = ()
    way: str = ""
    """What to do about unknown labels."""

    def refuse(self, one: Found, expected: str, found: object) -> Fault | None:
        if one.where is None:
            return super().refuse(one, expected, found)
        one.where.refuse(expected, found)
        one.where.contents.faults.way = self.way
        return None

    def refuse_repeat(self, one: Found, first: Found) -> None:
        row, other = one.where or first.where, first.where
        expected = "an image that is in no split without a table"
        if one.where and other:
            file = "" if other.contents is row.contents else f" of {other.contents.path.name}"
            expected = f"a path that is not in {row.contents.faults.word} {other.line}{file} already"
        row.refuse(expected, row.path)

    def check(self) -> None:
        super().check()
        for content in self.tables:
            content.faults.check()

    def collect(self, labels: Labels | None = None, empty_classes: EmptyClasses = "keep") -> Collection:
        collection = super().collect(labels, empty_classes)
        notes = [f"{content.path.name}: {note}" for content in self.tables for note in content.notes]
        everything = list(chain.from_iterable(self.found.values()))
        if vector := next((one.label for one in everything if isinstance(one.label, tuple)), None):
            notes.append(f"labels are float32, {counted(len(vector), 'number')} each")
        rows = [one for one in everything if one.where]
        groups = {one.key: one.where.group for one in rows if one.where.group}
        uses = tuple(dict.fromkeys(content.use for content in self.tables))
        collection = replace(collection, notes=(*collection.notes, *notes), tables=uses, groups=groups)
        names = self.tables[0].table.columns
        if others := [content.table.columns for content in self.tables if content.table.columns != names]:
            raise SourceError(f"tables: expected the same `columns` for each table, found {names} and {others[0]}")
        if not names:
            return collection
        rows.sort(key=lambda one: (self.tables.index(one.where.contents), one.where.line))
        cells = [one.where for one in rows]
        values = {name: read_column(name, number, cells) for number, name in enumerate(names)}
        columns = ColumnTable({one.key: number for number, one in enumerate(rows)}, values)
        return replace(collection, columns=columns)


def list_table(table: Table, labels: Labels | None = None) -> Listing:
    """Returns the images that a table lists, in the order of its rows; without labels if `labels` is "none".

    A key is the path of the image, relative to the table's root if the image is below the root. A missing file becomes
    a source that the conversion refuses. An invalid row raises SourceError, here or from the Listing's `collect`. If
    the table has no root, a path out of the table's folder is invalid: a table's author must not choose your files.
    """
    old, root = table.prefix
    content = read_table(replace(table, root=f"{old}=" if old else None), labels)
    folder = Path(os.path.abspath(root)) if root else table.path.parent
    inside, outside = os.path.join(folder, ""), Outside(folder)

    def has(path: str) -> bool:
        with contextlib.suppress(OSError):
            return not stat.S_ISDIR(os.lstat(os.path.join(folder, path)).st_mode)
        return False

    @cache
    def names(above: str) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {}
        with contextlib.suppress(OSError):
            for name in os.listdir(os.path.join(folder, above)):
                found.setdefault(_fold(name), []).append(name)
        return found

    @cache
    def folders(path: str) -> Set[str]:
        """Returns the folders on the disk that `path` may mean: case, blanks and Unicode forms of names may differ."""
        found = {"/" if os.path.isabs(path) else ""}
        for name in filter(None, path.split("/")):
            found = {os.path.join(up, one) for up in found for one in (name, *names(up).get(_fold(name), ()))}
        return found

    def near(paths: Iterable[str]) -> Iterator[str]:
        above = {os.path.dirname(way(path)) for path in paths for way in (os.path.normpath, _tidy)}
        for place in set(chain.from_iterable(map(folders, above))):
            yield from (os.path.join(place, one) for one in chain(*names(place).values()) if has_image_suffix(one))

    def below() -> Iterator[str]:
        for above, _, names in os.walk(folder):
            paths = (os.path.join(above, name).removeprefix(inside) for name in filter(has_image_suffix, names))
            yield from (path for path in paths if not clutter(path))

    found = _find_pictures(content, has, near, below if root else tuple)
    if content.rows and not any(found):
        content.faults.check()
        first = content.rows[0].path
        way = "copy the images to files here" if "://" in first else "give the folder of the paths by `--root`"
        where = f"{first!r} is not in {folder}: {way}"
        if os.path.isabs(first):
            there = next(folder for folder in Path(first).parents if os.path.lexists(folder))
            where = (
                f"of {first!r} only {str(there)!r} exists: correct the paths by `--root OLD=NEW`, or mount their folder"
            )
        raise SourceError(f"{table.path}: expected images at {counted(len(found), 'path')}, found none: {where}")
    images: list[Found] = []
    for row, path in zip(content.rows, found, strict=True):
        place = path or row.path
        key = os.path.normpath(os.path.join(inside, place))
        if not root and not key.startswith(inside):
            row.refuse(f"a path in the folder of {table.path.name} (`--root DIR` allows others)", row.path)
        outside.look(key, os.path.islink(key))
        key = key[len(inside) :] if key.startswith(inside) else key if os.path.isabs(place) else os.path.normpath(place)
        images.append(Found(os.fsencode(key), None, os.fsencode(place) if key != place else None, row))
        _check_split(row, known_split(key.split("/")[0]))
    splits = _splits_of_folders(content, [os.fsdecode(one.key) for one in images])
    listed = [(one.where.split or folder or DEFAULT_SPLIT, one) for one, folder in zip(images, splits, strict=True)]
    return _listing(Collection(FileOrigin(folder), kind="list", notes=outside.notes), [content], listed)


def _splits_of_folders(content: Contents, keys: Sequence[str]) -> Sequence[str]:
    """Returns the split that a folder in each of `keys` names; "" for all keys if folders do not decide the splits.
    `keys` are the paths of the images in the rows of the table. Folders that all keys share decide only if the folders
    below them name fewer than two splits."""
    above = [key.rpartition("/")[0] for key in keys]
    folders = {folder: folder.split("/") for folder in above}
    shared = [*takewhile(lambda level: len({*level}) == 1, zip(*folders.values(), strict=False))]
    words = {folder: [*map(known_split, names[len(shared) :])] for folder, names in folders.items()}
    levels = [level for level in zip(*words.values(), strict=False) if all(level)]
    is_clear = len(levels) == 1 and len({*levels[0]}) > 1  # also if a class has the name of a split
    firsts = (next(filter(None, some), "") for some in words.values())
    split_of = dict(zip(words, levels[0] if is_clear else firsts, strict=True))
    several, by_column = len({*split_of.values()} - {""}) > 1, any(row.split for row in content.rows)
    for row, folder in zip(content.rows, above, strict=True) if several else ():
        _check_split(row, split_of[folder], {*split_of.values()})
    are_first = bool(keys) and all(known_split(names[0]) for names in folders.values())
    if content.table.split_column or by_column or not (several or are_first):
        return [""] * len(keys)
    if not several:
        split_of = {folder: known_split(names[0]) for folder, names in folders.items()}
        words = {folder: [known_split(level[0]) for level in shared] for folder in folders}
    for key, folder in zip(keys, above, strict=True):
        if not split_of[folder] or (not is_clear and len({*words[folder]} - {""}) > 1):
            expected = "expected a column of splits, or in each path folders of one split"
            found = f"found {'several' if split_of[folder] else 'none'} in {key!r}"
            raise DoubtError(content.path, f"{expected}, {found}", [WITHOUT_SPLITS])
    content.notes.append("splits from the folders in paths")
    return [split_of[folder] for folder in above]


def describe(collection: Collection, tables: Mapping[str, Contents], skips_unlabeled: bool = False) -> Collection:
    """Returns the collection with the labels, splits and numbers of tables.

    `tables` has a table for each split by name, or {"": table} for all splits. A path in a table is an image's key or
    path in SRC. It may lack the suffix, or the folder of the table's split. `skips_unlabeled`: see Listing.

    If tables have labels, or SRC has none and is not a dataset, the tables list the images: an image only in SRC is
    left out and counted, and an image only in a table becomes a source that the conversion refuses. Otherwise, every
    image in SRC needs a row, and rows without an image are counted. Splits without a table stay unchanged.
    """
    contents = list(tables.values())
    is_labeled = any(sources[0].label is not None for sources in collection.splits.values())
    tables_list = any(content.label_names for content in contents) or (not is_labeled and collection.kind != "dataset")
    images: dict[str, tuple[str, Source]] = {  # by path and by key
        os.fsdecode(name): (split, source)
        for split, sources in collection.splits.items()
        for source in sources
        for name in (source.place, source.key)
        if isinstance(name, bytes)
    }
    ignored = collection.ignored.copy()
    used: set[bytes] = set()
    listed: list[tuple[str, Found]] = []
    for given, content in tables.items():
        named = [path for path, (split, _) in images.items() if split == given]
        everything = named if named and len(collection.splits) > 1 else list(images)
        paths = _find_pictures(
            content,
            has=images.__contains__,
            near=lambda _: images,
            everything=everything.__iter__,
            folders=["", given] if given else [""],
            identity=lambda path: images[path][1].key,
        )
        for row, path in zip(content.rows, paths, strict=True):
            if path:
                split, source = images[path]
                used.add(source.key)
                found = Found(source.key, source.label, source.place, row)
            elif tables_list:
                missing = Fault(f"expected an image at this path in SRC, as {content.path.name} lists it, found none")
                split = known_split(_tidy(row.path).split("/")[0]) or DEFAULT_SPLIT
                found = Found(os.fsencode(_tidy(row.path)), None, missing, row)
            else:
                ignored.add("row without an image", row.path)
                continue
            _check_split(row, "" if split == given else split, () if given or not path else collection.splits)
            listed.append((row.split or given or split, found))
        content.faults.check()
        if content.rows and not used:
            raise SourceError(
                f"{content.path}: expected paths of images in SRC, such as {next(iter(images), '')!r}, found only paths"
                f" without an image in SRC, such as {content.rows[0].path!r}; `--root OLD=NEW` replaces their beginning"
            )
    covers_all = "" in tables or len(collection.splits) == 1
    described = [split for split in collection.splits if covers_all or split in tables]
    left = [source.key for split in described for source in collection.splits[split] if source.key not in used]
    if left and not tables_list:
        raise SourceError(
            f"{contents[0].path}: expected a row for every image in SRC, found no row for {len(left):,} of "
            f"{counted(collection.num_sources, 'image')}, such as {os.fsdecode(left[0])!r}: add these rows"
        )
    if left:
        ignored.leave_out("image in no table", left)
    rest = {split: sources for split, sources in collection.splits.items() if split not in described}
    if rest and (numbers := [content for content in contents if content.table.columns]):
        raise SourceError(
            f"{numbers[0].path}: a table with columns of numbers needs a table for every split; found no table for "
            f"{next(iter(rest))!r}: add one, or leave the columns out"
        )
    listing = _listing(replace(collection, splits=rest, ignored=ignored), contents, listed)
    listing.skips_unlabeled = skips_unlabeled
    return listing.collect("folders")


def _check_split(row: Row, split: str, others: Container[str] = ()) -> None:
    """Raises DoubtError if a folder of the image in `row` names another split than the row: the cell is empty, and the
    folder's `split` is not train; or no option names the column, and it has one of `others`, which folders have."""
    word, column = split_name(row.split or ""), row.contents.of_splits
    is_other = word != "" and split not in ("", word) and word in others and not row.contents.table.split_column
    if is_other or (row.split is None and split not in ("", DEFAULT_SPLIT)):
        found = f"found {word!r}" if word else "found an empty cell: fill it in"
        raise DoubtError(
            row.contents.path,
            f"{row.contents.faults.word} {row.line}: expected a split, as the folder of {row.path!r} says {split!r}, "
            f"{found}",
            [*[column_reading(column, "split")] * bool(word), WITHOUT_SPLITS],
        )


def _listing(collection: Collection, contents: Sequence[Contents], listed: Sequence[tuple[str, Found]]) -> Listing:
    """Returns the Listing of the images in `listed`, and of the sources in `collection`, which no table describes.
    `listed` has (word for the split, image) for each image in the tables `contents`. If the tables have labels, these
    images get the labels of the tables."""
    found: dict[str, list[Found]] = {split: [] for split in in_split_order(split_name(word) for word, _ in listed)}
    classes: tuple[str, ...] | None = collection.classes
    names = dict(zip(collection.classes, collection.class_names, strict=False))
    labels: Sequence[str | Label] = [one.label for _, one in listed]
    others = [split for split, some in collection.splits.items() if some[0].label is not None]
    as_texts, way = False, ""
    if any(content.label_names for content in contents):
        given, labels = read_labels(contents, [(split_name(word), one.where) for word, one in listed])
        if others and any(isinstance(label, tuple) for label in labels):
            raise SourceError(f"{contents[0].path}: expected names of classes, as {others[0]!r} has, found numbers")
        as_texts = not {*others}.intersection(in_split_order([*found, *others])[:1])  # else that split has the classes
        classes, names = (given, {}) if as_texts else (classes, names)
        if not as_texts and collection.classes and not {*collection.classes}.intersection(labels):
            some = f"{others[0]!r} has the classes, such as {collection.classes[0]!r}"
            way = f"{some}: write these names into the table"
    for (word, one), label in zip(listed, labels, strict=True):
        found[split_name(word)].append(one._replace(label=label))
    for split, sources in collection.splits.items():
        found.setdefault(split, [])
        for source in sources:
            label = collection.classes[source.label] if as_texts and isinstance(source.label, int) else source.label
            found[split].append(Found(source.key, label, source.place))
    return _Rows(contents[0].path, found, collection, classes, names, tables=contents, way=way)


# --- finding the pictures that paths mean, also where names on the disk are written otherwise -------------------------

Change = Callable[[str], str]

_CHANGES: Sequence[tuple[str, Change]] = (
    ("", os.path.normpath),
    ("backslashes are read as slashes", lambda path: os.path.normpath(path.replace("\\", "/"))),
    ("blanks around names are ignored", lambda path: "/".join(map(str.strip, path.split("/")))),
    ("a slash at the beginning is ignored", lambda path: path.lstrip("/")),
    ("Unicode forms (NFC, NFD) are ignored", lambda path: unicodedata.normalize("NFC", path)),
    ("letter case is ignored", lambda path: unicodedata.normalize("NFC", path.lower())),
)
"""(description, function) of changes that may make a path in a table and a picture's path equal. They are tried in this
order, each after those before it: the fewer are needed, the better the two paths fit."""
_BY_NAME = "pictures are found by their names alone"


def _find_pictures(
    content: Contents,
    has: Callable[[str], bool],
    near: Callable[[Iterable[str]], Iterable[str]],
    everything: Callable[[], Iterable[str]],
    folders: Sequence[str] = ("",),
    identity: Callable[[str], Hashable] = str,
) -> list[str]:
    """Returns the path of each row's picture, or "" if there is none. Refuses a row that fits two pictures.

    - `has`: whether there is a picture at exactly this path
    - `near`: takes the paths in rows for which `has` is false, and returns the paths of pictures that may fit them
    - `everything`: returns the paths of all pictures. It is called only if no row has a picture otherwise
    - `folders`: the folders to which paths of rows may be relative, "" for none
    - `identity`: returns the same value for two paths of one picture
    """
    asked = [[f"{folder}/{row.path}" if folder else row.path for folder in folders] for row in content.rows]
    used: Counter[str] = Counter()

    def choose(row: Row, fitting: Iterable[str]) -> str:
        distinct = list({identity(path): path for path in fitting}.values())
        if len(distinct) > 1:
            row.refuse(f"the path of one image, and not of {distinct[0]!r} and {distinct[1]!r}", row.path)
        return distinct[0] if distinct else ""

    def search(numbers: Sequence[int], pictures: Iterable[str], name_of: Change = str) -> None:
        fitting: dict[str, list[str]] = {_fold(path): [] for number in numbers for path in asked[number]}
        for picture in pictures:
            name = _fold(name_of(picture))
            for key in {name, os.path.splitext(name)[0]} & fitting.keys():
                fitting[key].append(picture)
        for number in numbers:
            pairs = ((path, picture) for path in asked[number] for picture in fitting[_fold(path)])
            if fits := sorted((*_compare(path, name_of(picture)), picture) for path, picture in pairs):
                rank, ways, _ = fits[0]
                found[number] = choose(content.rows[number], [picture for other, _, picture in fits if other == rank])
                used.update([*ways, *([_BY_NAME] if name_of is os.path.basename else ())])

    found = [choose(row, filter(has, paths)) for row, paths in zip(content.rows, asked, strict=True)]
    if missing := [number for number, path in enumerate(found) if not path]:
        search(missing, near(chain.from_iterable(asked[number] for number in missing)))
    for name_of in (str, os.path.basename):
        if found and not any(found):
            search(range(len(found)), everything(), name_of)
    content.notes.extend(f"in {counted(used[way], 'row')}, {way}" for way in used)
    return found


def _tidy(path: str, changes: Sequence[tuple[str, Change]] = _CHANGES[:4]) -> str:
    """Returns a path after the changes: by default relative, with slashes, and without blanks around names."""
    for _, change in changes:
        path = change(path)
    return path


def _fold(path: str) -> str:
    """Returns a path after all changes: a text that is equal for two paths if they may mean the same picture."""
    return _tidy(path, _CHANGES)


def _compare(path: str, name: str) -> tuple[int, list[str]]:
    """Compares `path`, from a table and perhaps without suffix, with `name`, the path of a picture. Returns (rank,
    descriptions of the changes that make them equal). The lower the rank, the fewer changes; the highest needs all."""
    ways: list[str] = []
    for rank, (way, change) in enumerate(_CHANGES):
        changed = change(path), change(name)
        ways += [way] if way and changed != (path, name) else []
        path, name = changed
        if path in (name, os.path.splitext(name)[0]):
            return 2 * rank + (path != name), ways
    return 2 * len(_CHANGES), ways
