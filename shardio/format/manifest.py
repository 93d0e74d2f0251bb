"""The manifest of a set as frozen values that check themselves, from JSON and back.

The manifest is the commit record of a shard set: it is written last, and a folder without a manifest holds no set. Its
`digest` identifies the content: it is the sha256 of the canonical JSON of everything except `digest` and `provenance`.
`parse` checks the JSON and each single value; this module checks that the values fit together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

from shardio.errors import FormatError, show
from shardio.format import parse
from shardio.format.entries import (
    ArrayEntry,
    Crc32Entry,
    FileEntry,
    IndexEntry,
    OrderEntry,
    RejectsEntry,
    ShardEntry,
    SplitEntry,
)
from shardio.format.layout import (
    CRC32_ROW,
    FORMAT_NAME,
    FORMAT_VERSION,
    HEADER_NBYTES,
    LABELS_NAME,
    MANIFEST_NAME,
    MAX_ARRAYS,
    MAX_KEY_NBYTES,
    ORDER_ROW,
    RowType,
    SampleShape,
    check_array_name,
    check_kind,
    check_sample_shape,
    pixels_row,
)


@dataclass(frozen=True)
class Manifest:
    """The description of a set. The constructor raises FormatError if the values contradict each other."""

    sample_shape: SampleShape | None
    """None if the set has no pixels: its samples are made of arrays."""
    classes: tuple[str, ...]
    splits: Mapping[str, SplitEntry]
    rejects: RejectsEntry | None = None
    """None if no source was refused when the set was made."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    """Readable names of the classes, in their order; empty if the set has none. Two classes may have the same name."""
    pixels: str = "rgb"
    """How pixels are stored: see `pixels_row`."""

    def __post_init__(self) -> None:
        if self.sample_shape is not None:
            check_sample_shape(self.sample_shape)
        _ = parse.checked("pixels", lambda: self.pixels_row)
        if not self.splits:
            raise FormatError("splits: expected at least one split, found none")
        if (repeated := parse.first_repeated(self.classes)) is not None:
            raise FormatError(f"classes: expected distinct names, found {show(repeated)} twice")
        if self.class_names and len(self.class_names) != len(self.classes):
            raise FormatError(
                f"class_names: expected {len(self.classes)} names, one for each class, found {len(self.class_names)}"
            )
        names: set[str] = {MANIFEST_NAME}
        for entry in self.files:
            # Names that differ only in case are one file on some filesystems.
            if entry.file.lower() in names:
                raise FormatError(
                    f"file {entry.file!r}: expected file names that differ in more than case, found this name twice"
                )
            names.add(entry.file.lower())
        for name, split in self.splits.items():
            self._check_split(name, split)

    @cached_property
    def pixels_row(self) -> RowType | None:
        """The type of a row of the shards of pixels; None if the set has no pixels."""
        return None if self.sample_shape is None else pixels_row(self.sample_shape, self.pixels)

    @property
    def num_rejects(self) -> int:
        return 0 if self.rejects is None else self.rejects.num_rejects

    @property
    def files(self) -> list[FileEntry]:
        """All files of the set except the manifest."""
        rejects = [] if self.rejects is None else [self.rejects]
        return [*rejects, *chain.from_iterable(split.files for split in self.splits.values())]

    def _check_split(self, name: str, split: SplitEntry) -> None:
        if self.pixels_row is None:
            _check_no_pixels(f"splits.{name}", split)
        else:
            _check_pixels(f"splits.{name}", split, self.pixels_row)
        index_nbytes = HEADER_NBYTES + split.num_samples * split.index.dtype.itemsize
        _check_nbytes(f"splits.{name}", split.index, index_nbytes)
        self._check_orders(name, split)
        for array_name, array in split.arrays.items():
            parse.checked(f"splits.{name}.arrays", check_array_name, array_name)
            self._check_array(f"splits.{name}.arrays.{array_name}", array_name, array, split)

    def _check_orders(self, name: str, split: SplitEntry) -> None:
        """Raises FormatError unless pixels and arrays use every order, and only orders that exist."""
        for order in split.orders:
            _check_nbytes(f"splits.{name}", order, ORDER_ROW.file_nbytes(split.num_samples))
        used = {split.order, *(array.order for array in split.arrays.values())} - {None}
        if used != set(range(len(split.orders))):
            what = f"to use each of the {len(split.orders)} `orders`" if split.orders else "without `order`"
            raise FormatError(
                f"splits.{name}: expected pixels and arrays {what}, found that they use the orders "
                f"{sorted(used, key=str)}"
            )

    def _check_array(self, where: str, name: str, array: ArrayEntry, split: SplitEntry) -> None:
        parse.checked(where, check_kind, name, array.kind, array.row, self.sample_shape)
        if name == LABELS_NAME and split.index.has_label:
            raise FormatError(f"{where}: expected labels in this array or in the index, found labels in both")
        if array.order is None and array.num_rows != split.num_samples:
            raise FormatError(
                f"{where}: expected values for {split.num_samples} samples, found {array.num_rows} values"
            )
        for shard in array.shards:
            _check_nbytes(where, shard, array.row.file_nbytes(shard.num_samples))
        _check_nbytes(where, array.crc32, CRC32_ROW.file_nbytes(array.num_rows))

    @cached_property
    def digest(self) -> str:
        """The sha256 (hex) of the set's content. Sets with equal digests have equal pixels, labels, keys and order."""
        content = self._content()
        return hashlib.sha256(
            json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")
        ).hexdigest()

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "format": FORMAT_NAME,
            "format_version": FORMAT_VERSION,
            "sample_shape": None if self.sample_shape is None else list(self.sample_shape),
            "classes": list(self.classes),
            "splits": {name: split.content() for name, split in self.splits.items()},
        }
        if self.rejects is not None:
            content["rejects"] = self.rejects.content()
        if self.class_names:
            content["class_names"] = list(self.class_names)
        if self.pixels != "rgb":
            content["pixels"] = self.pixels
        return content

    def dumps(self) -> bytes:
        """Returns the bytes of manifest.json: keys sorted, one space of indent per level, a newline at the end."""
        document = {**self._content(), "provenance": dict(self.provenance), "digest": self.digest}
        return (json.dumps(document, sort_keys=True, indent=1, ensure_ascii=True) + "\n").encode("ascii")

    @property
    def nbytes(self) -> int:
        """The total size in bytes of all files except the manifest."""
        return sum(entry.nbytes for entry in self.files)


def _check_pixels(where: str, split: SplitEntry, row: RowType) -> None:
    if split.order is None and split.num_rows != split.num_samples:
        raise FormatError(
            f"{where}.num_samples: expected {split.num_rows}, as many as in the shards, found {split.num_samples}"
        )
    if not split.shards:
        raise FormatError(f"{where}.shards: expected at least one shard, found none")
    for shard in split.shards:
        _check_nbytes(where, shard, row.file_nbytes(shard.num_samples))


def _check_no_pixels(where: str, split: SplitEntry) -> None:
    parts = {"shards": bool(split.shards), "order": split.order is not None, "squashed": split.squashed}
    if found := [name for name, there in parts.items() if there]:
        raise FormatError(
            f"{where}: expected no shards, `order` or `squashed` in a set without pixels, found {', '.join(found)}"
        )
    if not split.arrays.keys() - {LABELS_NAME}:
        raise FormatError(
            f"{where}.arrays: expected at least one array besides `labels` in a set without pixels, found none"
        )


def _check_nbytes(where: str, entry: FileEntry, expected: int) -> None:
    if entry.nbytes != expected:
        raise FormatError(f"{where}, {entry.file}: nbytes: expected {expected}, found {entry.nbytes}")


# --- reading what another program may have written ------------------------------------------------------------------


_FILE_KEYS = {"file", "nbytes", "sha256"}
_KEYS = {"format", "format_version", "sample_shape", "classes", "splits", "provenance", "digest"}


def _file(value: object, where: str, more: Set[str] = frozenset(), optional: Set[str] = frozenset()) -> dict[str, Any]:
    """Returns the fields of a file's entry, the JSON object `value` at the place `where`: the keys `file`, `nbytes` and
    `sha256`, with checked values; and, unchecked, the other keys `more`, and those of `optional` that are there."""
    fields = parse.fields(value, where, _FILE_KEYS | more, optional)
    return fields | {
        "file": parse.name(fields["file"], f"{where}.file"),
        "nbytes": parse.count(fields["nbytes"], f"{where}.nbytes"),
        "sha256": parse.sha256(fields["sha256"], f"{where}.sha256"),
    }


def _shards(values: object, where: str, row: RowType) -> tuple[ShardEntry, ...]:
    """Returns the entries of shards with rows of the type `row`."""
    shards = []
    for i, value in enumerate(parse.sequence(values, where)):
        fields = _file(value, f"{where}[{i}]", {"num_samples"})
        parse.count(fields["num_samples"], f"{where}[{i}].num_samples", minimum=1)
        shards.append(ShardEntry(**fields, row=row))
    return tuple(shards)


def _index(value: object, where: str) -> IndexEntry:
    fields = _file(value, where, {"key_nbytes"}, optional={"label"})
    key_nbytes = parse.count(fields["key_nbytes"], f"{where}.key_nbytes", minimum=4)
    if key_nbytes % 8 != 4 or key_nbytes > MAX_KEY_NBYTES:
        raise parse.fault(f"{where}.key_nbytes", f"4 more than a multiple of 8, at most {MAX_KEY_NBYTES}", key_nbytes)
    has_label = "label" not in fields
    if (label := fields.pop("label", False)) is not False:
        raise parse.fault(f"{where}.label", "false (leave the key out if the index has labels)", label)
    return IndexEntry(**fields, has_label=has_label)


def _split(value: object, where: str, row: RowType) -> SplitEntry:
    """Returns a split's entry. `row` is the type of the pixels' rows; any type if there are no pixels."""
    optional = {"orders", "order", "arrays", "squashed"}
    fields = parse.fields(value, where, {"num_samples", "index", "shards"}, optional)
    orders = parse.filled(parse.sequence, fields["orders"], f"{where}.orders") if "orders" in fields else []
    arrays = parse.filled(parse.mapping, fields["arrays"], f"{where}.arrays") if "arrays" in fields else {}
    if fields.get("squashed", True) is not True:
        raise parse.fault(f"{where}.squashed", "true (leave the key out if it is false)", fields["squashed"])
    if len(arrays) > MAX_ARRAYS:
        raise parse.fault(f"{where}.arrays", f"at most {MAX_ARRAYS} arrays", sorted(arrays))
    return SplitEntry(
        num_samples=parse.count(fields["num_samples"], f"{where}.num_samples", minimum=1),
        index=_index(fields["index"], f"{where}.index"),
        shards=_shards(fields["shards"], f"{where}.shards", row),
        orders=tuple(OrderEntry(**_file(order, f"{where}.orders[{i}]")) for i, order in enumerate(orders)),
        order=_order_number(fields, where),
        arrays={name: _array(array, f"{where}.arrays.{name}") for name, array in arrays.items()},
        squashed="squashed" in fields,
    )


def _order_number(fields: Mapping[str, Any], where: str) -> int | None:
    return parse.count(fields["order"], f"{where}.order") if "order" in fields else None


def _array(value: object, where: str) -> ArrayEntry:
    fields = parse.fields(value, where, {"kind", "dtype", "shape", "crc32", "shards"}, {"order"})
    shape = tuple(parse.sequence(fields["shape"], f"{where}.shape"))
    row = parse.checked(where, RowType, parse.string(fields["dtype"], f"{where}.dtype"), shape)
    shards = parse.filled(parse.sequence, fields["shards"], f"{where}.shards")
    return ArrayEntry(
        kind=fields["kind"],  # checked by the manifest, which knows the samples' shape
        row=row,
        shards=_shards(shards, f"{where}.shards", row),
        crc32=Crc32Entry(**_file(fields["crc32"], f"{where}.crc32")),
        order=_order_number(fields, where),
    )


def _rejects(value: object, where: str) -> RejectsEntry:
    fields = _file(value, where, {"num_rejects"})
    parse.count(fields["num_rejects"], f"{where}.num_rejects", minimum=1)
    return RejectsEntry(**fields)


def parse_manifest(data: bytes) -> Manifest:
    """Returns the manifest in `data`. Raises FormatError, with the expected and the found value, if it is invalid."""
    document = parse.document(data)
    # Name and version come first: a set of a later version may have any other keys.
    if type(document) is not dict or document.get("format") != FORMAT_NAME:
        found = document.get("format") if type(document) is dict else document
        raise parse.fault("format", repr(FORMAT_NAME), found)
    version = document.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        way_out = "convert the sources of an older set again; a newer set needs a newer shardio"
        raise parse.fault("format_version", f"{FORMAT_VERSION} ({way_out})", version)
    parse.fields(document, "manifest", _KEYS, optional={"class_names", "rejects", "pixels"})
    splits = parse.mapping(document["splits"], "splits")
    names = parse.filled(parse.sequence, document["class_names"], "class_names") if "class_names" in document else []
    parse.anything(parse.mapping(document["provenance"], "provenance"), "provenance")
    shape, pixels = document["sample_shape"], document.get("pixels", "rgb")
    if shape is not None:
        shape = parse.checked("sample_shape", check_sample_shape, tuple(parse.sequence(shape, "sample_shape")))
    if "pixels" in document and (pixels == "rgb" or shape is None):
        raise parse.fault("pixels", "no key `pixels` in a set of plain pixels, or without any", pixels)
    row = parse.checked("pixels", pixels_row, shape or (1, 1, 1), pixels)
    manifest = Manifest(
        sample_shape=shape,
        classes=parse.strings(document["classes"], "classes"),
        splits={parse.name(name, "splits"): _split(split, f"splits.{name}", row) for name, split in splits.items()},
        rejects=_rejects(document["rejects"], "rejects") if "rejects" in document else None,
        provenance=document["provenance"],
        class_names=parse.strings(names, "class_names"),
        pixels=pixels,
    )
    if document["digest"] != manifest.digest:
        raise parse.fault("digest", f"{manifest.digest} (computed from the content)", document["digest"])
    return manifest
