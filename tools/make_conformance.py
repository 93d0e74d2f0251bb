"""Makes the conformance kit: small sets that every reader of the format must read, and sets that it must refuse.

    python tools/make_conformance.py FOLDER

FOLDER then has a folder for each set, and `expected.json`, which says what a reader must find in a valid set, and why
it must refuse another. The bytes are the same on every machine: conformance/expected.json is the golden copy, with a
checksum of the files of each set. docs/format.md describes the kit.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance_sets import Draft, Entry, deep, npy, sealed, sha256, valid_sets, written

Files = dict[str, "bytes | Place"]


@dataclass(frozen=True)
class Place:
    """What is in the place of a file: "folder", "fifo", or "link", a symbolic link to a sound copy of the file."""

    kind: str
    data: bytes = b""


@dataclass(frozen=True)
class Refusal:
    """A set that a reader must refuse, made from a valid set."""

    base: str
    reason: str
    draft: Callable[[Draft], object] = id
    """Changes the set before its manifest gets its digest."""
    files: Callable[[Files], object] = id
    """Changes the files after the manifest was written."""
    schema: bool = True
    """Whether the JSON Schema refuses the manifest, too."""
    when: str = "open"
    """When a reader must refuse at the latest: "open", "read" (the sample), or "verify", a check of the whole set."""
    part: str = "pixels"
    """What is read."""


def put(place: str, value: Any) -> Callable[[Draft], None]:
    """Sets a value of the manifest, by a place such as "splits.train.shards.0.file"; `...` removes the key."""

    def change(draft: Draft) -> None:
        *path, last = [int(step) if step.isdigit() else step for step in place.split(".")]
        root: Any = draft.manifest
        for step in path:
            root = root[step]
        if value is ...:
            del root[last]
        else:
            root[last] = copy.deepcopy(value)

    return change


def rename(place: str, name: str) -> Callable[[Draft], None]:
    """Gives another name to the key at a place of the manifest."""

    def change(draft: Draft) -> None:
        *path, last = place.split(".")
        root: Any = draft.manifest
        for step in path:
            root = root[step]
        root[name] = root.pop(last)

    return change


def publish(name: str, at: int, data: bytes) -> Callable[[Draft], None]:
    """Overwrites bytes of a file, and writes its new sha256 into the manifest."""

    def change(draft: Draft) -> None:
        old = draft.files[name]
        new = draft.files[name] = old[:at] + data + old[at + len(data) :]
        draft.manifest = json.loads(json.dumps(draft.manifest).replace(sha256(old), sha256(new)))

    return change


def text(old: str, new: str) -> Callable[[Files], None]:
    """Replaces text in manifest.json, and leaves its digest as it is."""

    def change(files: Files) -> None:
        data = read(files, "manifest.json")
        assert data.count(old.encode("ascii")) == 1, old
        files["manifest.json"] = data.replace(old.encode("ascii"), new.encode("utf-8"))

    return change


def content(data: bytes) -> Callable[[Files], object]:
    """Replaces all of manifest.json."""
    return lambda files: files.update({"manifest.json": data})


def flip(name: str, at: int) -> Callable[[Files], None]:
    """Flips the lowest bit of a byte."""

    def change(files: Files) -> None:
        data = bytearray(read(files, name))
        data[at] ^= 1
        files[name] = bytes(data)

    return change


def resize(name: str, nbytes: int) -> Callable[[Files], None]:
    """Adds zeros to a file, or truncates it by -nbytes."""

    def change(files: Files) -> None:
        data = read(files, name)
        files[name] = data + bytes(nbytes) if nbytes > 0 else data[:nbytes]

    return change


def remove(name: str) -> Callable[[Files], object]:
    return lambda files: files.pop(name)


def replace(name: str, kind: str) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        files[name] = Place(kind, read(files, name))

    return change


def read(files: Files, name: str) -> bytes:
    data = files[name]
    assert isinstance(data, bytes)
    return data


SHARD, INDEX, ORDER = "train-00000.npy", "train-index.npy", "train-order-0.npy"
TRAIN = "splits.train"
FIRST = f"{TRAIN}.shards.0"
ARRAYS = f"{TRAIN}.arrays"
COLUMN = ["year", "<i8"]


def unfit(place: str, value: Any, base: str = "pixels", schema: bool = True) -> Refusal:
    """A manifest with a value that its place does not allow."""
    shown = json.dumps(value) if value is not ... else "missing"
    return Refusal(base, f"{place} is {shown[:40]}", put(place, value), schema=schema)


def misspelled(reason: str, old: str, new: str, base: str = "pixels", schema: bool = False) -> Refusal:
    """A manifest whose text is changed after its digest was computed."""
    return Refusal(base, reason, files=text(old, new), schema=schema)


def damaged(reason: str, change: Callable[[Files], object], base: str = "pixels", **more: Any) -> Refusal:
    """A set with a valid manifest and files that do not belong to it."""
    return Refusal(base, reason, files=change, schema=False, **more)


NUMBER = '"num_rejects": 0'
PROVENANCE = '"provenance": {}'

REFUSALS = {
    # The text of the manifest.
    "json-truncated": damaged("manifest.json ends too early", resize("manifest.json", -3)),
    "json-more": damaged("manifest.json has NUL bytes after the object", resize("manifest.json", 2)),
    "json-list": Refusal("pixels", "manifest.json is a list", files=content(b"[]")),
    "json-empty": damaged("manifest.json is empty", content(b"")),
    "json-not-ascii": misspelled("a letter in UTF-8", PROVENANCE, '"provenance": {"\u00fc": 1}'),
    "json-repeated-key": misspelled("a key twice", NUMBER, f"{NUMBER}, {NUMBER}"),
    "json-same-key": misspelled("a key twice, once with an escape", NUMBER, f'{NUMBER}, "num_reject\\u0073": 0'),
    "json-comma": misspelled("a comma after the last value", NUMBER, f"{NUMBER},"),
    "json-leading-zero": misspelled("a number with a leading zero", NUMBER, '"num_rejects": 00'),
    "json-escape": misspelled("an escape that JSON does not have", PROVENANCE, '"provenance": {"\\x41": 1}'),
    "json-control": misspelled("a newline in a string", PROVENANCE, '"provenance": {"\n": 1}'),
    "json-nan": misspelled("NaN in provenance", PROVENANCE, '"provenance": {"x": NaN}'),
    "json-infinity": misspelled("-Infinity in provenance", PROVENANCE, '"provenance": {"x": -Infinity}'),
    "json-large": misspelled("a number beyond float64", PROVENANCE, '"provenance": {"x": 1e999}'),
    "json-long": misspelled("an integer of 4301 digits", PROVENANCE, f'"provenance": {{"x": {"9" * 4301}}}'),
    "json-surrogate": misspelled("the lone surrogate U+D800", PROVENANCE, '"provenance": {"x": "\\ud800"}'),
    "json-low-surrogate": misspelled("the lone surrogate U+DD00", PROVENANCE, '"provenance": {"x": "\\udd00"}'),
    "json-deep": Refusal("pixels", "101 levels of provenance", put("provenance", deep(101)), schema=False),
    "json-very-deep": misspelled("100,000 levels", PROVENANCE, f'"provenance": {{"x": {"[" * 100_000}'),
    # The values of the manifest.
    "format": unfit("format", "shard"),
    "version-newer": unfit("format_version", 2),
    "version-text": unfit("format_version", "1"),
    "version-true": unfit("format_version", True),
    "version-float": misspelled("format_version is 1.0", '"format_version": 1', '"format_version": 1.0'),
    "digest-other": misspelled("a digest of other content", '"dog"', '"fox"'),
    "digest-missing": misspelled("no digest", '"digest"', '"provenance_digest"', schema=True),
    "key-missing": unfit("rejects", ...),
    "key-unknown": unfit("comment", "x"),
    "key-unknown-in-shard": unfit(f"{FIRST}.comment", "x"),
    "shape-zero": unfit("sample_shape", [0, 3, 3]),
    "shape-large": unfit("sample_shape", [2, 3, 65537]),
    "shape-of-two": unfit("sample_shape", [6, 3]),
    "shape-other": unfit("sample_shape", [3, 3, 3], schema=False),
    "classes-repeated": unfit("classes", ["cat", "cat"]),
    "class-names-few": unfit("class_names", ["cat"], schema=False),
    "class-names-empty": unfit("class_names", []),
    "splits-empty": unfit("splits", {}),
    "split-name": Refusal("pixels", "the split is called ../train", rename(TRAIN, "../train")),
    "count-true": unfit(f"{FIRST}.num_samples", True),
    "count-zero": unfit(f"{FIRST}.num_samples", 0),
    "count-negative": unfit("rejects.num_rejects", -1),
    "count-large": unfit("rejects.nbytes", 2**53 + 1),
    "count-other": unfit(f"{TRAIN}.num_samples", 4, schema=False),
    "nbytes-other": unfit(f"{FIRST}.nbytes", 4096, schema=False),
    "nbytes-of-index": unfit(f"{TRAIN}.index.nbytes", 4096 + 39 * 3, schema=False),
    "sha256-short": unfit(f"{FIRST}.sha256", "0" * 63),
    "sha256-upper-case": unfit(f"{FIRST}.sha256", "A" * 64),
    "name-escapes": unfit(f"{FIRST}.file", "../train-00000.npy"),
    "name-absolute": unfit(f"{FIRST}.file", "/etc/passwd"),
    "name-hidden": unfit(f"{FIRST}.file", ".train-00000.npy"),
    "name-in-folder": unfit(f"{FIRST}.file", "train/00000.npy"),
    "name-newline": unfit(f"{FIRST}.file", "train-00000.npy\n"),
    "name-nul": unfit(f"{FIRST}.file", "train-00000.npy\0"),
    "name-long": unfit(f"{FIRST}.file", "x" * 201),
    "name-repeated": unfit(f"{TRAIN}.shards.1.file", SHARD, schema=False),
    "name-differs-in-case": unfit("rejects.file", SHARD.upper(), schema=False),
    "name-of-the-manifest": unfit("rejects.file", "manifest.json", schema=False),
    "shards-empty": unfit(f"{TRAIN}.shards", []),
    "squashed-false": unfit(f"{TRAIN}.squashed", False),
    "label-true": unfit(f"{TRAIN}.index.label", True),
    "key-nbytes": unfit(f"{TRAIN}.index.key_nbytes", 24),
    "columns-empty": unfit(f"{TRAIN}.index.columns", []),
    "column-type": unfit(f"{TRAIN}.index.columns.0", ["year", "<i4"], "columns"),
    "column-repeated": unfit(f"{TRAIN}.index.columns", [COLUMN, ["year", "<f8"]], "columns", schema=False),
    "column-of-every-index": unfit(f"{TRAIN}.index.columns.0", ["crc32", "<i8"], "columns"),
    "columns-many": unfit(f"{TRAIN}.index.columns", [[f"c{i}", "<i8"] for i in range(51)], "columns"),
    "arrays-empty": unfit(ARRAYS, {}),
    "array-name": Refusal("arrays", "an array called crc32", rename(f"{ARRAYS}.flag", "crc32")),
    "array-column": Refusal(
        "arrays", "an array with the name of a column", rename(f"{ARRAYS}.flag", "year"), schema=False
    ),
    "array-dtype": unfit(f"{ARRAYS}.flag.dtype", ">u2", "arrays"),
    "array-dtype-other": unfit(f"{ARRAYS}.flag.dtype", "<f4", "arrays", schema=False),
    "array-shape-other": unfit(f"{ARRAYS}.flag.shape", [2], "arrays", schema=False),
    "array-shape-zero": unfit(f"{ARRAYS}.flag.shape", [0], "arrays"),
    "array-shape-long": unfit(f"{ARRAYS}.flag.shape", [1] * 9, "arrays"),
    "array-shape-overflow": unfit(f"{ARRAYS}.flag.shape", [65536] * 8, "arrays", schema=False),
    "array-kind": unfit(f"{ARRAYS}.flag.kind", "text", "arrays"),
    "mask-shape": unfit(f"{ARRAYS}.mask.shape", [3, 2], "arrays", schema=False),
    "boxes-shape": unfit(f"{ARRAYS}.boxes.shape", [5, 1], "arrays"),
    "boxes-names-repeated": unfit(f"{ARRAYS}.boxes.names", ["head", "head"], "arrays"),
    "names-without-boxes": unfit(f"{ARRAYS}.flag.names", ["head"], "arrays"),
    "image-channels": unfit(f"{ARRAYS}.small.shape", [1, 3, 1], "arrays", schema=False),
    "labels-twice": Refusal("arrays", "labels in the index and in an array", rename(f"{ARRAYS}.flag", "labels")),
    "labels-type": Refusal(
        "no-pixels",
        "labels of float16",
        lambda draft: (rename(f"{ARRAYS}.labels", "x")(draft), rename(f"{ARRAYS}.latent", "labels")(draft)),
    ),
    "order-missing": unfit(f"{TRAIN}.order", 2, "arrays", schema=False),
    "order-without-orders": unfit(f"{TRAIN}.order", 0),
    "order-unused": unfit(f"{TRAIN}.orders", [{"file": "x", "nbytes": 4120, "sha256": "0" * 64}], schema=False),
    "no-pixels-shards": unfit("sample_shape", None),
    "no-pixels-mask": unfit(f"{ARRAYS}.latent.kind", "mask", "no-pixels"),
    "no-pixels-no-array": Refusal("no-pixels", "no pixels, and no array but labels", put(f"{ARRAYS}.latent", ...)),
    "no-pixels-squashed": unfit(f"{TRAIN}.squashed", True, "no-pixels"),
    # The files.
    "manifest-missing": damaged("no manifest.json", remove("manifest.json")),
    "manifest-link": damaged("manifest.json is a symbolic link", replace("manifest.json", "link")),
    "shard-missing": damaged("a shard is missing", remove(SHARD)),
    "shard-truncated": damaged("a shard lacks its last byte", resize(SHARD, -1)),
    "shard-longer": damaged("a shard has a byte too many", resize(SHARD, 1)),
    "shard-empty": damaged("a shard lacks all bytes", resize(SHARD, -4132)),
    "shard-folder": damaged("a folder in the place of a shard", replace(SHARD, "folder")),
    "shard-fifo": damaged("a FIFO in the place of a shard", replace(SHARD, "fifo")),
    "shard-link": damaged("a symbolic link in the place of a shard", replace(SHARD, "link")),
    "shard-magic": damaged("a bit of the first byte of a shard", flip(SHARD, 0)),
    "shard-padding": damaged("a bit of a shard's header behind its text", flip(SHARD, 4000)),
    "shard-header-end": damaged("a bit of the last byte of a shard's header", flip(SHARD, 4095)),
    "shard-dtype": Refusal("pixels", "the type |i1 in the header of a shard", publish(SHARD, 22, b"i"), schema=False),
    "shard-other-shape": Refusal(
        "pixels", "a shard of (2, 3, 2, 3)", publish(SHARD, 0, npy("'|u1'", (2, 3, 2, 3), b"")), schema=False
    ),
    "shard-fortran": Refusal("pixels", "a shard in Fortran order", publish(SHARD, 44, b"True, "), schema=False),
    "index-missing": damaged("the index is missing", remove(INDEX)),
    "index-truncated": damaged("the index lacks its last byte", resize(INDEX, -1)),
    "index-bit": damaged("a bit of a label", flip(INDEX, 4096)),
    "index-header": Refusal("pixels", "another type of label", publish(INDEX, 33, b"u"), schema=False),
    "index-label": Refusal(
        "pixels", "a label that no class has", publish(INDEX, 4096, b"\2"), schema=False, when="verify"
    ),
    "index-label-negative": Refusal(
        "pixels", "a label below 0", publish(INDEX, 4096, b"\xff" * 8), schema=False, when="verify"
    ),
    "order-bit": damaged("a bit of an order", flip(ORDER, 4096), "arrays"),
    "order-large": Refusal(
        "arrays", "an order that names the stored row 3 of 3", publish(ORDER, 4096, b"\3"), schema=False, when="read"
    ),
    "order-negative": Refusal(
        "arrays", "an order that names the stored row -1", publish(ORDER, 4096, b"\xff" * 8), schema=False, when="read"
    ),
    "array-missing": damaged("a file of an array is missing", remove("train-flag-00000.npy"), "arrays", part="flag"),
    "array-truncated": damaged("an array lacks a byte", resize("train-flag-00000.npy", -1), "arrays", part="flag"),
    "array-header": damaged("a bit of an array's header", flip("train-flag-00000.npy", 22), "arrays", part="flag"),
    "array-crc32-bit": damaged("a bit of a crc32", flip("train-flag-crc32.npy", 4096), "arrays", part="flag"),
    "array-bit": damaged("a bit of a value", flip("train-flag-00000.npy", 4096), "arrays", part="flag", when="read"),
    "pixel-first": damaged("a bit of the first pixel", flip(SHARD, 4096), when="read"),
    "pixel-last": damaged("a bit of the last pixel", flip(SHARD, 4096 + 17), when="read"),
    "index-crc32": Refusal("pixels", "another crc32", publish(INDEX, 4132, b"\0\1\2\3"), schema=False, when="read"),
}
"""By name. Each is a single fault in a set that is valid otherwise."""


def write_set(folder: Path, files: Files) -> str:
    """Writes a set, and returns the sha256 of a list of its files: "SHA256  NAME" and a newline each, as sha256sum
    prints it, in the order of the names."""
    folder.mkdir(parents=True)
    lines = []
    for name, data in sorted(files.items()):
        if isinstance(data, bytes):
            (folder / name).write_bytes(data)
            lines.append(f"{sha256(data)}  {name}\n")
        elif data.kind == "folder":
            (folder / name).mkdir()
        elif data.kind == "fifo":
            os.mkfifo(folder / name)
        else:
            (folder / f"other-{name}").write_bytes(data.data)
            (folder / name).symlink_to(f"other-{name}")
    return sha256("".join(lines).encode("ascii"))


def files_of(draft: Draft) -> Files:
    return {**draft.files, "manifest.json": written(sealed(draft.manifest))}


def spelled_otherwise(manifest: Entry) -> bytes:
    """Returns a manifest with the same values in another text: order of keys, white space, escapes, -0."""
    turned = json.dumps(dict(reversed(list(manifest.items()))), separators=(" ,\t", "\r\n: "))
    escaped = turned.replace('"cat"', '"\\u0063a\\u0074"').replace(': 0 ,\t"sha256"', ': -0 ,\t"sha256"')
    assert escaped.count("-0 ") == 1
    return escaped.encode("ascii")


def make_kit(folder: Path) -> Entry:
    """Writes all sets into the folder, and returns what expected.json says."""
    expected: Entry = {"format_version": 1, "valid": {}, "refused": {}}
    for name, draft in valid_sets().items():
        manifest = sealed(draft.manifest)
        spellings = {name: written(manifest)}
        if name == "pixels":
            spellings["spelled-otherwise"] = spelled_otherwise(manifest)
        for spelled, data in spellings.items():
            listing = write_set(folder / "valid" / spelled, {**draft.files, "manifest.json": data})
            expected["valid"][spelled] = {"digest": manifest["digest"], "listing": listing, "splits": draft.samples}
    for name, refusal in REFUSALS.items():
        draft = valid_sets()[refusal.base]
        refusal.draft(draft)
        files = files_of(draft)
        refusal.files(files)
        expected["refused"][name] = {
            "reason": refusal.reason,
            "when": refusal.when,
            "schema": refusal.schema,
            "split": "train",
            "part": "labels" if refusal.part == "pixels" and draft.manifest["sample_shape"] is None else refusal.part,
            "sample": 0,
            "listing": write_set(folder / "refused" / name, files),
        }
    return expected


def dumps(expected: Entry) -> str:
    return json.dumps(expected, indent=1, sort_keys=True).replace("NaN", "null") + "\n"


def main() -> None:
    if len(sys.argv) != 2 or Path(sys.argv[1]).exists():
        sys.exit("make_conformance.py: expected one argument, a folder that does not exist yet")
    folder = Path(sys.argv[1])
    (folder / "expected.json").write_text(dumps(make_kit(folder)), encoding="ascii")


if __name__ == "__main__":
    main()
