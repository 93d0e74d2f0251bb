"""Lists the members of zip archives, and archives (zip and tar) whose folders mean what folders of a tree mean."""

from __future__ import annotations

import contextlib
import io
import os
import re
import struct
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableSequence, Sequence, Set
from dataclasses import replace
from itertools import chain
from pathlib import Path

from shardio.conversion.images.headers import has_image_suffix
from shardio.conversion.images.mask import look
from shardio.conversion.options import Labels
from shardio.conversion.sources.collection import Extent, FileOrigin, Place, Zipped, read_file
from shardio.conversion.sources.listing import Found, Listing
from shardio.conversion.sources.meaning import Disk
from shardio.conversion.sources.names import Ignored, clutter, known_split, sorted_entries, split_name
from shardio.conversion.sources.tree import Scan, has_splits, list_tree, tables_of
from shardio.errors import DecodeError, SourceError, first_of
from shardio.system.opening import naming

ZIP_MAGIC = b"PK\x03\x04"
# At these bytes of a member's header are the lengths of its name and of the extra field; both come after it.
_LENGTHS = struct.Struct("<26xHH")
_UTF8 = 1 << 11
"""The bit of a member's flags that declares its name to be UTF-8."""
_UNIX = 3
_LATIN = re.compile("[\0-~¡-ÿ]*")
_LEVEL = re.compile("[0-9a-f]{1,2}")
_WORDNET = re.compile(r"n\d{8}", re.ASCII)


def offset_in(archive: zipfile.ZipFile, one: zipfile.ZipInfo) -> int:
    """Returns the offset of the content of the member `one` in a zip archive, in bytes."""
    assert archive.fp is not None
    archive.fp.seek(one.header_offset)
    lengths: tuple[int, int] = _LENGTHS.unpack(archive.fp.read(_LENGTHS.size))
    return one.header_offset + _LENGTHS.size + sum(lengths)


def zip_members(path: Path, file: bytes, ignored: Ignored) -> Iterator[tuple[str, Extent]]:
    """Yields (name, place) of each file in the zip archive `path`, without clutter, which is counted in `ignored`. A
    place is an Extent whose `file` is the argument `file`. Raises SourceError for a damaged archive, for names that
    lead out of the archive's folder or have an unknown encoding, for encryption, and for unusual compression."""
    try:
        with naming(path), zipfile.ZipFile(path) as archive:
            names = [_name(one) for one in archive.infolist()]
            has_slashes = any("/" in name.rstrip("/") for name in names)  # .NET wrote backslashes instead
            for one, name in zip(archive.infolist(), names, strict=True):
                if not name:  # in an unknown encoding, which tells the suffix
                    if has_image_suffix(one.filename):
                        found = f"{one.filename!r:.80}: unpack it with its encoding, as by `unzip -O GBK`"
                        raise SourceError(f"{path}: expected names in UTF-8, found {found}, and convert the folder")
                    continue
                name = name if has_slashes else name.replace("\\", "/")
                if name.startswith("/") or os.pardir in name.split("/"):
                    raise SourceError(f"{path}: expected relative names without '..', found {name!r:.80}")
                if name.endswith("/"):
                    continue
                if kind := clutter(name):
                    ignored.add(kind, name)
                    continue
                if one.flag_bits & 1 or one.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    found = f"{name!r:.80} encrypted or compressed otherwise: unpack the archive"
                    raise SourceError(f"{path}: expected members that are stored or deflated, found {found}")
                zipped = Zipped(one.file_size, one.CRC, one.compress_type == zipfile.ZIP_DEFLATED)
                yield name, Extent(file, offset_in(archive, one), one.compress_size, zipped)
    except SourceError:
        raise
    except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError) as error:
        raise SourceError(f"{path}: damaged, or no zip archive: {error}") from None


def _name(one: zipfile.ZipInfo) -> str:
    """Returns a member's name. Without a flag for UTF-8, it is cp437 if it has only letters of Western Europe, or UTF-8
    if it was packed under Unix, as by macOS. Returns "" for other names, which may be GBK."""
    if one.flag_bits & _UTF8 or _LATIN.fullmatch(one.filename):
        return one.filename
    with contextlib.suppress(UnicodeError):
        if one.create_system == _UNIX:
            return one.filename.encode("cp437").decode()
    return ""


def list_members(
    src: Path,
    folder: Path,
    images: Sequence[Found],
    words: Mapping[str, str],
    ignored: Ignored,
    labels: Labels | None,
    told: Set[str] | None,
) -> Listing:
    """Returns the Listing of the images of archives in `folder`, as if the archives had been unpacked.

    - `images`: the images in all archives. `key` is the name in the archive, and `where` the archive's path
    - `words`: the word for the split in the path of each archive, by that path; "" if there is no such word
    - `labels`, `told`: see `list_tree`

    Several archives of a split are one tree if all of their images lie in folders; otherwise each is a folder.
    """
    by_archive: dict[str, dict[str, Place]] = {archive: {} for archive in words}
    for one in images:
        name = os.fsdecode(one.key)
        if by_archive[one.where].setdefault(name, one.place) is not one.place:
            raise SourceError(f"{src}: expected distinct names in {one.where!r}, found {name!r} twice: rename one")
    parts = {archive: _unwrapped(archive, names) for archive, names in by_archive.items()}
    are_several = len(set(map(split_name, words.values()))) < len(parts)
    is_class = are_several and labels != "none" and not all("/" in name for name in chain(*parts.values()))
    is_flat = all(word or "/" not in archive for archive, word in words.items())
    # cat_0.tar and cat_1.tar have one class.
    stems = {archive: _stem(archive) for archive in parts}
    bases = {archive: re.sub(r"[\W_]+\d+$", "", stem) for archive, stem in stems.items()}
    num_series = len({(words[archive], base) for archive, base in bases.items()})
    is_numbered = is_class and is_flat and len(set(words.values())) < num_series < len(parts)
    above = {one: f"{bases[one]}/{stem}" if is_numbered else stem for one, stem in stems.items()}

    def placed(is_above: bool) -> dict[str, Place]:
        return {
            _path(archive, words[archive], above[archive] if is_above else "", name): place
            for archive, names in parts.items()
            for name, place in names.items()
        }

    is_above, paths = is_class, placed(is_class)
    if not is_above and len(paths) < len(images):  # names begin anew in each archive
        is_above, paths = True, placed(True)
    scan = _Members(src, folder, paths, ignored)
    beside = [one.name for one in sorted_entries(src, Ignored())] if src.is_dir() else []
    # img2dataset writes a parquet file about each tar.
    scan.tables[src] = tables_of(src, [name for name in beside if not name.endswith(".parquet")])
    some = first_of(list(stems.values()), 3, repr)
    series = {(words[archive], re.sub(r"\d+", "", stem)) for archive, stem in stems.items()}
    if is_numbered:
        scan.doubts.append(f"expected an archive for each class, found several, such as {some}")
    elif is_class and len(series) == len(set(words.values())) and not all(map(_WORDNET.fullmatch, stems.values())):
        scan.doubts.append(f"expected names of classes, found {some}, which would become classes")
    listing = list_tree(src, labels, told=told, scan=scan)
    found: dict[str, list[Found]] = {}
    for split, ones in listing.found.items():
        at = (one.place if isinstance(one.place, bytes) else one.key for one in ones)
        found[split] = [one._replace(place=paths[os.fsdecode(path)]) for one, path in zip(ones, at, strict=True)]
    note = f"{src.name}: {'the archives' if is_above else 'the folders in'} {first_of(list(parts), 3)}"
    known = replace(listing.known, origin=FileOrigin(folder), notes=(*listing.known.notes, note))
    # Folders in an archive are no SRC, and no `--masks`.
    options = [{"--labels": "folders"}, {"--labels": "none"}] + [{"--labels": "leaf"}] * (not is_numbered)
    inside = "folders in archives"
    noun = "names of archives" if is_numbered else inside if not is_above else "archives" if is_flat else "folders"
    readings = []
    for reading in listing.readings:
        if reading.src is None and (reading.options in options or "--table" in reading.options):
            meaning = reading.meaning.replace("folders", inside if "leaf" in reading.options.values() else noun)
            readings.append(reading._replace(meaning=meaning.replace("in archives in each split", "in each split")))
    doubts = [*listing.doubts, "unpack it to convert some of its folders"] if listing.doubts else ()
    return replace(listing, found=found, known=known, doubts=doubts, readings=readings)


def _path(archive: str, word: str, above: str, name: str) -> str:
    """Returns the path of the image `name` of an archive, as if the archive had been unpacked: [WORD/][ABOVE/]NAME.
    `word` is the archive's word for its split, or ""; `above` are the folders that stand for the archive, or ""."""
    first, _, rest = name.partition("/")
    if word and rest and split_name(first) == split_name(word):
        name = rest
    return "/".join(filter(None, (word or os.path.dirname(archive) * bool(above), above, name)))


def _stem(archive: str) -> str:
    return os.path.splitext(os.path.basename(archive))[0]


def _unwrapped(archive: str, names: Mapping[str, Place]) -> Mapping[str, Place]:
    """Returns `names`, name in the archive -> place, without the outer folders that hold all images. A folder that
    names a split, or may be the only class, stays."""
    while len(tops := {name.partition("/")[0] for name in names}) == 1 and all("/" in name for name in names):
        (top,) = tops
        # 0/f/3: levels of folders that are made from the digits of an id.
        is_level = _LEVEL.fullmatch(top) is not None or any(name.count("/") == 1 for name in names)
        if known_split(top) or (top != _stem(archive) and is_level):
            break
        names = {name.partition("/")[2]: place for name, place in names.items()}
    return names


class _Members(Scan):
    """Scans the archives in `folder` as if they had been unpacked into `root`. `paths` has the place of each image, by
    the image's path below `root`."""

    def __init__(self, root: Path, folder: Path, paths: Mapping[str, Place], ignored: Ignored) -> None:
        super().__init__(root, "images")
        self.ignored, self._folder, self._paths = ignored, folder, paths
        self.disk = Disk(lambda path: False, self._look, lambda folder: self.tables.get(folder, []), has_splits)
        self._entries: dict[str, set[tuple[str, bool]]] = defaultdict(set)
        for path in paths:
            above, is_image = path, True
            while above:
                above, _, name = above.rpartition("/")
                self._entries[above].add((name, is_image))
                is_image = False

    def identity(self, folder: Path) -> object:
        return folder

    def _inside(self, path: Path) -> str:
        return str(path)[len(str(self.root)) + 1 :]

    def _look(self, path: Path) -> tuple[bool, tuple[int, int]] | None:
        place = self._paths[self._inside(path)]
        assert isinstance(place, Extent)
        with contextlib.suppress(DecodeError):
            return look(io.BytesIO(read_file(self._folder / os.fsdecode(place.file), place)))
        return None

    def entries(self, folder: Path, others: MutableSequence[str] | None = None) -> Iterator[tuple[str, bool]]:
        yield from sorted(self._entries[self._inside(folder)])

    def has_images(self, folder: Path) -> bool:
        return True  # `paths` has only images

    def has_folders(self, folder: Path) -> bool:
        return bool(self.list(folder)[0])
