"""The sets of the conformance kit that every reader must read, in memory. `make_conformance.py` writes them.

They follow the text of docs/format.md: this module uses the standard library alone, and no code of shardio.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

Entry = dict[str, Any]
"""The entry of a file in a manifest."""
Rows = list[bytes]

SHAPE = (2, 3, 3)
NUM_PIXELS = 18
ODD_CLASSES = ["cat", 'd\u00f6g \U0001f42d "\\/\b\f\n\r\t\0\x7f', "not UTF-8: \udc80\udcff"]
"""Names with everything that JSON escapes."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def npy(descr: str, shape: tuple[int, ...], rows: bytes) -> bytes:
    """Returns an NPY file with a header of 4096 bytes. `descr` is written as in Python."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", 4086) + text.encode().ljust(4085) + b"\n" + rows


def picture(number: int) -> bytes:
    return bytes((61 * number + 7 * i * i) % 256 for i in range(NUM_PIXELS))


@dataclass
class Array:
    """The values of an array in stored rows, `counts[k]` of them in file k."""

    dtype: str
    shape: tuple[int, ...]
    rows: Rows
    counts: tuple[int, ...]
    more: Entry = field(default_factory=dict)


class Draft:
    """A set in memory: its files, its manifest, and what a reader must find in it."""

    def __init__(self, classes: Sequence[str], shape: tuple[int, ...] | None = SHAPE, **more: Any) -> None:
        self.files: dict[str, bytes] = {}
        self.samples: dict[str, list[Entry]] = {}
        self.manifest: Entry = {
            "format": "shardio",
            "format_version": 1,
            "sample_shape": shape and list(shape),
            "classes": list(classes),
            "splits": {},
            "rejects": self.add("rejects.jsonl", b"", num_rejects=0),
            "provenance": {},
            **more,
        }

    def add(self, name: str, data: bytes, **more: Any) -> Entry:
        self.files[name] = data
        return {"file": name, "nbytes": len(data), "sha256": sha256(data), **more}

    def add_shards(self, prefix: str, array: Array) -> list[Entry]:
        entries, start = [], 0
        for number, count in enumerate(array.counts):
            rows = b"".join(array.rows[start : start + count])
            data = npy(repr(array.dtype), (count, *array.shape), rows)
            entries.append(self.add(f"{prefix}-{number:05d}.npy", data, num_samples=count))
            start += count
        return entries

    def add_split(
        self,
        name: str,
        labels: Sequence[int | None],
        counts: tuple[int, ...] = (),
        arrays: Mapping[str, Array] | None = None,
        columns: Mapping[str, tuple[str, Sequence[float]]] | None = None,
        orders: Sequence[Sequence[int]] = (),
        **more: Any,
    ) -> Draft:
        """Adds a split. It has pixels if there are `counts`, the samples of each shard. A label None means that the
        index has none. `more` goes into the entry of the split, where `order` is the pixels' order."""
        num_samples, columns = len(labels), columns or {}
        parts = {key: (array, array.more.get("order")) for key, array in (arrays or {}).items()}
        if counts:
            pictures = Array("|u1", SHAPE, [picture(i) for i in range(sum(counts))], counts)
            parts = {"pixels": (pictures, more.get("order")), **parts}
        found = self.samples[name] = []
        for i in range(num_samples):
            key = f"{name}/\u00fc {i}.png".encode() + b"\xff"  # not UTF-8
            values = {part: array.rows[i if n is None else orders[n][i]] for part, (array, n) in parts.items()}
            sums = {part: {"sha256": sha256(value), "crc32": crc32(value)} for part, value in values.items()}
            numbers = {column: list(values)[i] for column, (_, values) in columns.items()}
            found.append({"label": labels[i], "key": key.hex(), "columns": numbers, "parts": sums})
        entry: Entry = {"num_samples": num_samples, "index": self._add_index(name, columns), "shards": [], **more}
        if counts:
            entry["shards"] = self.add_shards(name, parts["pixels"][0])
        if orders:
            entry["orders"] = [
                self.add(f"{name}-order-{n}.npy", npy("'<i8'", (num_samples,), struct.pack(f"<{num_samples}q", *order)))
                for n, order in enumerate(orders)
            ]
        if arrays:
            entry["arrays"] = {key: self._add_array(name, key, array) for key, array in arrays.items()}
        self.manifest["splits"][name] = entry
        return self

    def _add_index(self, split: str, columns: Mapping[str, tuple[str, Sequence[float]]]) -> Entry:
        samples = self.samples[split]
        has_label = samples[0]["label"] is not None
        fields = [("label", "<i8")] if has_label else []
        fields += [("key", "|S20"), ("source_width", "<u4"), ("source_height", "<u4"), ("crc32", "<u4")]
        fields += [(name, dtype) for name, (dtype, _) in columns.items()]
        rows = b""
        for i, sample in enumerate(samples):
            rows += struct.pack("<q", sample["label"]) if has_label else b""
            checksum = sample["parts"].get("pixels", {"crc32": 0})["crc32"]
            rows += struct.pack("<20sIII", bytes.fromhex(sample["key"]), 500 + i, 333, checksum)
            for dtype, values in columns.values():
                rows += struct.pack("<q" if dtype == "<i8" else "<d", values[i])
        entry = self.add(f"{split}-index.npy", npy(str(fields), (len(samples),), rows), key_nbytes=20)
        if columns:
            entry["columns"] = [[name, dtype] for name, (dtype, _) in columns.items()]
        return entry if has_label else {**entry, "label": False}

    def _add_array(self, split: str, name: str, array: Array) -> Entry:
        sums = struct.pack(f"<{len(array.rows)}I", *map(crc32, array.rows))
        return {
            "kind": "array",
            "dtype": array.dtype,
            "shape": list(array.shape),
            "crc32": self.add(f"{split}-{name}-crc32.npy", npy("'<u4'", (len(array.rows),), sums)),
            "shards": self.add_shards(f"{split}-{name}", array),
            **array.more,
        }


def canonical(manifest: Entry) -> bytes:
    """Returns the text whose sha256 is the digest."""
    content = {key: value for key, value in manifest.items() if key not in ("digest", "provenance")}
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")


def sealed(manifest: Entry) -> Entry:
    return {**manifest, "digest": sha256(canonical(manifest))}


def written(manifest: Entry) -> bytes:
    return (json.dumps(manifest, sort_keys=True, indent=1) + "\n").encode("ascii")


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def vectors(*counts: int) -> Array:
    return Array("<f2", (2,), [struct.pack("<2e", i, -i / 2) for i in range(sum(counts))], counts)


def deep(levels: int) -> Entry:
    value: Entry = {}
    for _ in range(levels - 1):
        value = {"deeper": value}
    return value


def valid_sets() -> dict[str, Draft]:
    numbers = {"year": ("<i8", (2001, -1, 1999)), "score": ("<f8", (0.5, float("nan"), -1e300))}
    arrays = {
        "boxes": Array(
            *("<f4", (1, 5), [floats(0, 0, 2, 1, 0), floats(1, 0, 3, 2, 1), floats(0, 0, 0, 0, -1)], (2, 1)),
            {"kind": "boxes", "order": 0, "names": ["head", "tail"]},
        ),
        "small": Array("|u1", (1, 1, 3), [bytes([i, 2 * i, 3 * i]) for i in range(3)], (3,), {"kind": "image"}),
        "mask": Array("|b1", (2, 3), [bytes([i, 1, 0, 1, 0, i]) for i in range(2)], (1, 1), {"kind": "mask"}),
        "flag": Array("<u2", (), [struct.pack("<H", 40000 + i) for i in range(3)], (3,)),
    }
    arrays["mask"].more["order"] = 1
    soft = Array("<f4", (2,), [floats(1, 0), floats(0.5, 0.5), floats(0, 1)], (1, 1, 1))
    targets = Array("<f4", (), [floats(i / 4) for i in range(3)], (3,))
    strange = {"longest integer": 10**4299, "largest": 1.7976931348623157e308, "deep": deep(99), "text": "\udc80 /"}
    return {
        "pixels": Draft(["cat", "dog"]).add_split("train", [0, 1, 0], (2, 1)),
        "columns": Draft(["cat", "dog"]).add_split("train", [0, 1, 1], (3,), columns=numbers),
        "arrays": Draft(["cat", "dog"]).add_split(
            "train", [0, 1, 0], (2, 1), arrays, {"year": ("<i8", (3, 2, 1))}, [(2, 0, 2), (1, 1, 0)], order=0
        ),
        "splits": Draft(["cat", "dog"])
        .add_split("train", [1, 0, 1, 0], (1, 2, 1))
        .add_split("val.2", [0, 1], (1, 1), squashed=True),
        "no-classes": Draft([]).add_split("train", [-(2**63), 2**63 - 1], (2,)),
        "no-labels": Draft([]).add_split("train", [None, None], (1, 1)),
        "float-labels": Draft([]).add_split("train", [None] * 3, (3,), {"labels": targets}),
        "no-pixels": Draft(["sky", "sea"], None).add_split(
            "train", [None] * 3, arrays={"labels": soft, "latent": vectors(2, 1)}
        ),
        "names": Draft(ODD_CLASSES, class_names=["a", "a", ""], provenance=strange).add_split("train", [2, 1, 0], (3,)),
        "chosen": Draft(["cat", "dog"]).add_split("train", [1, 0, 1, 1, 0], (2, 1), orders=[(2, 1, 1, 0, 2)], order=0),
    }
