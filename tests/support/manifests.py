"""Manifests as JSON that is changed and sealed again, so that nothing but the change itself can be refused."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardio.errors import FormatError
from shardio.format.entries import FileEntry
from shardio.format.manifest import parse_manifest

Document = dict[str, Any]
JsonPath = tuple[str | int, ...]


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def seal(changed: Document) -> Document:
    """Gives the document the digest of its own content, so that nothing but the change itself can be refused."""
    content = {key: value for key, value in changed.items() if key not in ("digest", "provenance")}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return {**changed, "digest": sha(text)}


def reseal(out: Path, entry: FileEntry, data: bytes) -> None:
    """Has the manifest say that this is what the file should be."""
    (out / entry.file).write_bytes(data)
    text = (out / "manifest.json").read_text().replace(entry.sha256, hashlib.sha256(data).hexdigest())
    (out / "manifest.json").write_text(json.dumps(seal(json.loads(text))))


def dump(value: object) -> bytes:
    return json.dumps(value).encode("ascii")


def at(root: Any, path: JsonPath) -> Any:
    for step in path:
        root = root[step]
    return root


def put(root: Any, path: JsonPath, value: object) -> None:
    at(root, path[:-1])[path[-1]] = value


def paths(value: object, prefix: JsonPath = ()) -> Iterator[JsonPath]:
    """Every place in a JSON value, the value itself first."""
    yield prefix
    children: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    for step, child in children:
        yield from paths(child, (*prefix, step))


def refused(data: bytes, most_characters: int = 1001) -> str:
    """The message with which parse_manifest refuses these bytes: what was expected and what was found, in few words."""
    with pytest.raises(FormatError) as caught:
        parse_manifest(data)
    message = str(caught.value)
    assert "expected" in message or "must " in message, message
    assert "found" in message, message
    assert len(message) < most_characters, f"{len(message)} characters: {message[:300]}"
    return message


def name_of(path: JsonPath) -> str:
    """Returns the place as messages write it: splits.train.shards[0].nbytes"""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Replaces some bytes by others: one flipped, a piece of JSON, or of the data; or nothing."""
    mutated = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        start, source = rng.randrange(len(mutated) + 1), rng.randrange(len(mutated) + 1)
        count = rng.choice([0, 1, 1, 3, 50, len(mutated)])
        pieces = [b"", b"0", b'"', b",", b"9" * 30, b"NaN", b"[", b"}", b"\\u0000", b"-", b"\0", b"\xff"]
        flipped = bytes(byte ^ 1 << rng.randrange(8) for byte in mutated[start : start + 1])
        mutated[start : start + count] = rng.choice([*pieces, flipped, mutated[source : source + 100]])
    return bytes(mutated)


def mutate_value(rng: random.Random, value: Document) -> Document:
    """Replaces, copies, renames or removes values."""
    changed = copy.deepcopy(value)
    odd: list[Any] = [
        *(0, 1, -1, 2, 3, 18, 32, 2**53, 2**53 + 1, 10**30, 0.5, 1.0, True, False, None, [], {}),
        *("", "x", "../x", "train-00000.npy", "a\0b", "0" * 64, "\ud800"),
    ]
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        places = [path for path in paths(changed) if path]
        path = rng.choice(places)
        parent, step = at(changed, path[:-1]), path[-1]
        old, other = parent[step], copy.deepcopy(at(changed, rng.choice(places)))
        new = rng.choice([rng.choice(odd), other, old + rng.choice([-1, 1, 18]) if type(old) is int else old])
        kind = rng.randrange(3)
        if kind == 0:
            parent[step] = new
        elif kind == 1 and len(changed) > 1:
            del parent[step]
        elif isinstance(parent, list):
            parent.insert(rng.randrange(len(parent) + 1), new)
        else:
            parent[rng.choice(["x", "file", "train", "TRAIN", "", "nbytes"])] = new
    return changed


NO_COUNT: list[object] = [
    True,
    False,
    1.0,
    1.5,
    "1",
    "",
    None,
    [],
    {},
    [1],
    -1,
    2**53 + 1,
    10**400,
]
NO_STRING: list[object] = [True, 1, 1.5, None, [], {}, ["x"]]
NO_LIST: list[object] = [True, 1, 1.5, None, "x", {}, {"0": 1}]
NO_OBJECT: list[object] = [True, 1, 1.5, None, "x", [], [["file", "x"]]]
BAD_NAMES: list[object] = [
    *NO_STRING,
    "",
    ".",
    "..",
    "../x",
    "/x",
    ".hidden",
    "a/b",
    "a\\b",
    "a\0b",
    "a b",
    "a\n",
    "x" * 201,
    "\u00fc",
    "\uff0e\uff0e\uff0fx",
    "\ud800",
    "-x",
]
NO_SHA256: list[object] = [
    *NO_STRING,
    "",
    "0" * 63,
    "0" * 65,
    "0" * 63 + "g",
    "A" * 64,
    "0" * 64 + "\n",
    " " + "0" * 63,
    "\u0660" * 64,
]
