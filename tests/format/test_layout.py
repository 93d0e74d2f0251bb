"""The bytes of the format, written down here as literals: a change of any of them is a change of the format."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import change_split
from manifests import at, paths, seal
from places import DATA

from shardio.conversion.arrays import ArrayDeclaration
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.errors import ShardioError
from shardio.format.layout import (
    HEADER_NBYTES,
    check_sample_shape,
    index_dtype,
    index_header,
    index_name,
    is_safe_name,
    key_field_nbytes,
    pixels_row,
    shard_name,
)
from shardio.format.manifest_file import load_manifest
from shardio.reading.shardset import open_shards
from shardio.sets.verify import verify

# Three samples in two shards, published once. No test writes there.
PIXELS: tuple[tuple[int, ...], ...] = (
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17),
    (255, 254, 253, 252, 251, 250, 0, 1, 2, 128, 127, 126, 64, 32, 16, 8, 4, 2),
    (7, 77, 177, 9, 99, 199, 1, 10, 100, 2, 20, 200, 3, 30, 30, 5, 55, 155),
)
LABELS = (0, 1, 0)
KEYS = (b"cat/tom.png", b"dog/rex.png", b"cat/garfield-\xc3\xbc.png")
WIDTHS = (500, 499, 3)
HEIGHTS = (375, 333, 2)
CRC32 = (3707076485, 2560197574, 3162116248)
# golden-arrays: the same stored rows, one of which no sample uses, with four arrays.
ORDER = (2, 0, 2)
"""The stored row of each sample, for the pixels, the mask and the year."""
MASKS = ((0, 0, 0, 1, 1, 1), (9, 9, 9, 9, 9, 9), (2, 2, 0, 255, 0, 0))
YEARS = (2009, -1, 1 << 40)
CLIP = ((1.0, -2.0) * 6, (0.5, 65504.0) * 6, (0.0, 0.099976) * 6)
SCORES = (0.75, math.nan, -math.inf)
"""A value for each sample: these arrays have no order."""
# golden-latents: samples without pixels, whose latents are the values of CLIP.
VECTORS = ((0.0, 1.0), (0.5, 0.5), (1.0, 0.0))
# The digest, and the sha256 of manifest.json, which has the sha256 of each other file.
GOLDEN = {
    "golden": (
        "9c9a84a2f0f6ee0c52c0269c829f1671c8bd44fc02c994cf41116da6d7e0aff6",
        "77ced5bb6769a16691caef97ebda79f488bbfe71ed001bf9a9ecfe2b8471f1bf",
    ),
    "golden-arrays": (
        "6fcd5c286740a26a7dbdf0560697ace8c68dd31aa20c086763bc15ebd7fdd188",
        "2f76656a60a65be92556114c46d15c93994f00498054c2c941b90fa46d04f748",
    ),
    "golden-latents": (
        "a14510f203b215f73ca9404f567e978af9ffc5f461f2d8fa8cc8566e2ced7b69",
        "061b71a7d90e8a1f5ca4cc8c92486153447553273fd4fc6ec3cf67fd06c7a2f1",
    ),
}


# --- headers ---------------------------------------------------------------------------------------------------------


def padded(text: bytes) -> bytes:
    """A header: 4,096 bytes, spaces between the text and the newline at the end."""
    return text + b" " * (4095 - len(text)) + b"\n"


def test_headers_are_these_bytes() -> None:
    imagenet = padded(
        b"\x93NUMPY\x01\x00\xf6\x0f{'descr': '|u1', 'fortran_order': False, 'shape': (1281167, 256, 256, 3), }",
    )
    assert pixels_row((256, 256, 3)).file_header(1281167) == imagenet
    imagenet = padded(
        b"\x93NUMPY\x01\x00\xf6\x0f{'descr': [('label', '<i8'), ('key', '|S28'), ('source_width', '<u4'), "
        b"('source_height', '<u4'), ('crc32', '<u4')], 'fortran_order': False, 'shape': (1281167,), }"
    )
    assert index_header(1281167, index_dtype(28)) == imagenet


def test_every_header_is_one_page() -> None:
    assert HEADER_NBYTES == 4096
    for num_samples in (1, 9, 10, 1281167, 10**10, 1 << 53):
        headers = [pixels_row((size, size, size)).file_header(num_samples) for size in (1, 224, 65536)]
        headers += [index_header(num_samples, index_dtype(key_nbytes)) for key_nbytes in (4, 12, 65532)]
        assert {len(header) for header in headers} == {4096}


# --- index rows ------------------------------------------------------------------------------------------------------


def test_index_fields_are_aligned_without_padding_for_every_key_length() -> None:
    for longest in range(1, 301):
        width = key_field_nbytes(longest)
        assert longest <= width < longest + 8
        assert width % 8 == 4
        dtype = index_dtype(width)
        assert dtype.fields is not None
        assert dtype.itemsize == 8 + width + 3 * 4
        offsets = {name: dtype.fields[name][1] for name in dtype.names or ()}
        fixed = {"source_width": 8 + width, "source_height": 12 + width, "crc32": 16 + width}
        assert offsets == {"label": 0, "key": 8, **fixed}
    for width in {*range(-4, 305)} - {key_field_nbytes(longest) for longest in range(301)}:
        with pytest.raises(ValueError, match=rf"must be 4 more than a multiple of 8, .*; found {width}$"):
            index_dtype(width)


# --- names and shapes ------------------------------------------------------------------------------------------------


def test_safe_characters_are_exactly_these() -> None:
    first = {chr(code) for code in range(0x3000) if is_safe_name(chr(code))}
    later = {chr(code) for code in range(0x3000) if is_safe_name("a" + chr(code))}
    alphanumeric = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
    assert first == alphanumeric
    assert later == alphanumeric | set("._-")
    assert [is_safe_name("9" * length) for length in (0, 1, 200, 201)] == [False, True, True, False]


def test_file_names_come_from_the_split() -> None:
    assert shard_name("train", 0) == "train-00000.npy"
    assert shard_name("val", 12345) == "val-12345.npy"
    assert shard_name("train", 100000) == "train-100000.npy"
    assert index_name("train") == "train-index.npy"


@pytest.mark.parametrize(
    "shape",
    [
        *((), (1,), (2, 2), (1, 2, 3, 4), (0, 1, 1), (1, -1, 1), (1, 1, 65537)),
        *((1.0, 1, 1), (True, 1, 1), ("1", 1, 1), (None, 1, 1), (np.int64(1), 1, 1)),
    ],
)
def test_other_sample_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must be \(height, width, channels\), each from 1 to 65536; found") as caught:
        check_sample_shape(shape)
    assert repr(shape) in str(caught.value)
    assert check_sample_shape((65536, 1, 65536)) == (65536, 1, 65536)


# --- the golden sets -------------------------------------------------------------------------------------------------


def write_plain(out: Path, **names: Any) -> None:
    with ShardWriter(out, (2, 3, 3), classes=["cat", "dog"], shard_nbytes=4096 + 2 * 18, **names) as writer:
        for pixels, label, key, size in zip(PIXELS, LABELS, KEYS, zip(HEIGHTS, WIDTHS, strict=True), strict=True):
            writer.append(np.array(pixels, np.uint8).reshape(2, 3, 3), label, key=key, source_size=size)


def write_arrays(out: Path) -> None:
    write_plain(out, class_names=["Egyptian cat", "golden retriever"])
    masks = np.array(MASKS, "|u1").reshape(3, 2, 3)
    change_split(out, {"mask": ("mask", masks), "year": ("array", np.array(YEARS, "<i8"))}, np.array(ORDER), most=2)
    scores = np.array(SCORES, "<f8")
    change_split(out, {"clip": ("array", np.array(CLIP, "<f2")), "score": ("array", scores)}, most=2)


def write_latents(out: Path) -> None:
    arrays: dict[str, ArrayDeclaration] = {"latent": ("array", "float16", (12,)), "year": ("array", "int64", ())}
    options: dict[str, Any] = {"labels": ("float32", 2), "classes": ["sky", "sea"], "shard_nbytes": 4096 + 2 * 24}
    with ShardWriter(out, None, arrays=arrays, **options) as writer:
        for i, (latent, vector) in enumerate(zip(CLIP, VECTORS, strict=True)):
            values = {"latent": np.array(latent, np.float16), "year": 2000 + i}
            writer.append(None, vector, key=f"{i}.png", source_size=(333, 500), **values)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_files_are_the_published_ones(name: str) -> None:
    digest, sha256 = GOLDEN[name]
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (DATA / name).iterdir()}
    assert found.pop("manifest.json") == sha256
    document = json.loads((DATA / name / "manifest.json").read_bytes())
    entries = [at(document, path[:-1]) for path in paths(document) if path[-1:] == ("file",)]
    assert found == {entry["file"]: entry["sha256"] for entry in entries}
    assert document["digest"] == seal(document)["digest"] == digest
    assert load_manifest(DATA / name).nbytes == sum(entry["nbytes"] for entry in entries)
    assert verify(DATA / name).ok


@pytest.mark.parametrize("write", [write_plain, write_arrays, write_latents])
def test_the_same_samples_give_the_golden_bytes_again(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path)
    (name,) = (name for name, (digest, _) in GOLDEN.items() if digest == load_manifest(tmp_path).digest)
    made, golden = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (tmp_path, DATA / name))
    for files in (made, golden):
        del files["manifest.json"]  # which names the version of the package that wrote it
    assert made == golden


def test_golden_set_opens_with_these_samples() -> None:
    shards = open_shards(DATA / "golden")
    assert shards.classes == ("cat", "dog")
    assert [tuple(sample.image.ravel().tolist()) for sample in shards] == list(PIXELS)
    assert tuple(shards.labels.tolist()) == tuple(label for _, label in shards) == LABELS
    columns = {"key": KEYS, "source_width": WIDTHS, "source_height": HEIGHTS, "crc32": CRC32}
    assert {name: tuple(shards.index[name].tolist()) for name in columns} == columns
    out = np.zeros((3, 2, 3, 3), np.uint8)
    shards.gather(np.array([2, 0, 1]), out)
    assert out.reshape(3, 18).tolist() == [list(PIXELS[i]) for i in (2, 0, 1)]


def test_golden_arrays_open_with_these_samples() -> None:
    shards = open_shards(DATA / "golden-arrays")
    assert len(shards) == 3
    assert shards.class_names == ("Egyptian cat", "golden retriever")
    for i, row in enumerate(ORDER):
        assert tuple(shards[i].image.ravel().tolist()) == PIXELS[row]
        assert shards[i].label == LABELS[row]
        assert shards[i].arrays["mask"].ravel().tolist() == list(MASKS[row])
        assert shards[i].arrays["year"] == YEARS[row]
        np.testing.assert_array_equal(shards[i].arrays["clip"], np.array(CLIP[i], np.float16))
        np.testing.assert_array_equal(shards[i].arrays["score"], SCORES[i])


def test_golden_latents_open_with_these_samples() -> None:
    shards = open_shards(DATA / "golden-latents")
    assert [(image, label.tolist()) for image, label in shards] == [(None, list(vector)) for vector in VECTORS]
    assert shards[1].arrays["latent"].tolist() == list(CLIP[1])
    assert shards[1].arrays["year"].tolist() == 2001
    with pytest.raises(ShardioError, match=r"golden-latents.*pixels"):
        shards.sample_shape  # noqa: B018
