"""The bytes of the format, written down here as literals: a change of any of them is a change of the format."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from places import DATA

from shardio.conversion.writing.set_writer import ShardWriter
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

GOLDEN = DATA / "golden"
"""Three samples in two shards, published once. No test writes here."""

GOLDEN_PIXELS: tuple[tuple[int, ...], ...] = (
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17),
    (255, 254, 253, 252, 251, 250, 0, 1, 2, 128, 127, 126, 64, 32, 16, 8, 4, 2),
    (7, 77, 177, 9, 99, 199, 1, 10, 100, 2, 20, 200, 3, 30, 30, 5, 55, 155),
)
GOLDEN_LABELS = (0, 1, 0)
GOLDEN_KEYS = (b"cat/tom.png", b"dog/rex.png", b"cat/garfield-\xc3\xbc.png")
GOLDEN_WIDTHS = (500, 499, 3)
GOLDEN_HEIGHTS = (375, 333, 2)
GOLDEN_CRC32 = (3707076485, 2560197574, 3162116248)
GOLDEN_DIGEST = "9c9a84a2f0f6ee0c52c0269c829f1671c8bd44fc02c994cf41116da6d7e0aff6"
GOLDEN_SHA256 = {
    "manifest.json": "77ced5bb6769a16691caef97ebda79f488bbfe71ed001bf9a9ecfe2b8471f1bf",
    "train-00000.npy": "2e4687c0088ddcaedca680c63dce0cb9f2e1bda4a96baac8f08c048d905f6e89",
    "train-00001.npy": "04495d06aa479de349eb59693b697c5977df765f3e0d61a98072b0b1e7ac495d",
    "train-index.npy": "0f612d4d77c3df0ce1991fb166b23550ec7b1deae49d043caa8d58321bb61ffd",
}


def padded(text: bytes) -> bytes:
    """A golden header: 4,096 bytes, spaces between the text and the newline at the end."""
    return text + b" " * (4095 - len(text)) + b"\n"


# --- headers ---------------------------------------------------------------------------------------------------------


def test_shard_headers_are_these_bytes() -> None:
    small = padded(
        b"\x93NUMPY\x01\x00\xf6\x0f{'descr': '|u1', 'fortran_order': False, 'shape': (2, 2, 3, 3), }",
    )
    assert pixels_row((2, 3, 3)).file_header(2) == small
    imagenet = padded(
        b"\x93NUMPY\x01\x00\xf6\x0f{'descr': '|u1', 'fortran_order': False, 'shape': (1281167, 256, 256, 3), }",
    )
    assert pixels_row((256, 256, 3)).file_header(1281167) == imagenet


def test_index_headers_are_these_bytes() -> None:
    small = padded(
        b"\x93NUMPY\x01\x00\xf6\x0f{'descr': [('label', '<i8'), ('key', '|S20'), ('source_width', '<u4'), "
        b"('source_height', '<u4'), ('crc32', '<u4')], 'fortran_order': False, 'shape': (3,), }"
    )
    assert index_header(3, index_dtype(20)) == small
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
        assert dtype.itemsize % 8 == 0
        offsets = {name: dtype.fields[name][1] for name in dtype.names or ()}
        assert offsets == {
            "label": 0,
            "key": 8,
            "source_width": 8 + width,
            "source_height": 12 + width,
            "crc32": 16 + width,
        }
        assert all(offset % dtype[name].alignment == 0 for name, offset in offsets.items())


def test_index_dtype_takes_the_widths_that_key_field_nbytes_gives_and_no_other() -> None:
    allowed = {key_field_nbytes(longest) for longest in range(301)}
    for width in range(-4, 305):
        if width in allowed:
            assert index_dtype(width)["key"].itemsize == width
        else:
            with pytest.raises(ValueError, match=rf"must be 4 more than a multiple of 8, .*; found {width}$"):
                index_dtype(width)


# --- names and shapes ------------------------------------------------------------------------------------------------


def test_names_of_one_to_two_hundred_safe_characters_are_safe() -> None:
    assert all(map(is_safe_name, ("a", "0", "train-00000.npy", "x..y", "val.", "9" * 200)))
    assert not any(map(is_safe_name, ("", "..", ".hidden", "-rf", "../x", "a/b", "a\n", "\ud800", "9" * 201)))


def test_safe_characters_are_exactly_these() -> None:
    first = {chr(code) for code in range(0x3000) if is_safe_name(chr(code))}
    later = {chr(code) for code in range(0x3000) if is_safe_name("a" + chr(code))}
    alphanumeric = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
    assert first == alphanumeric
    assert later == alphanumeric | set("._-")


def test_file_names_come_from_the_split() -> None:
    assert shard_name("train", 0) == "train-00000.npy"
    assert shard_name("val", 12345) == "val-12345.npy"
    assert shard_name("train", 100000) == "train-100000.npy"
    assert index_name("train") == "train-index.npy"
    assert all(is_safe_name(shard_name("t", number)) for number in (0, 99999, 10**6))


@pytest.mark.parametrize("shape", [(1, 1, 1), (256, 256, 3), (65536, 1, 65536)])
def test_sample_shapes_are_accepted(shape: tuple[int, int, int]) -> None:
    assert check_sample_shape(shape) == shape


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


# --- the golden set --------------------------------------------------------------------------------------------------


def golden_array() -> np.ndarray[tuple[int, int, int, int], np.dtype[np.uint8]]:
    return np.array(GOLDEN_PIXELS, np.uint8).reshape(3, 2, 3, 3)


def test_golden_files_are_the_published_ones() -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in GOLDEN.iterdir()}
    assert found == GOLDEN_SHA256


def test_golden_set_opens_with_these_samples() -> None:
    shards = open_shards(GOLDEN)
    assert len(shards) == 3
    assert shards.sample_shape == (2, 3, 3)
    assert shards.classes == ("cat", "dog")
    assert shards.digest == GOLDEN_DIGEST
    for i, (image, label) in enumerate(shards):
        assert tuple(image.ravel().tolist()) == GOLDEN_PIXELS[i]
        assert label == GOLDEN_LABELS[i]
    assert tuple(shards.labels.tolist()) == GOLDEN_LABELS
    assert tuple(shards.index["key"].tolist()) == GOLDEN_KEYS
    assert tuple(shards.index["source_width"].tolist()) == GOLDEN_WIDTHS
    assert tuple(shards.index["source_height"].tolist()) == GOLDEN_HEIGHTS
    assert tuple(shards.index["crc32"].tolist()) == GOLDEN_CRC32
    out = np.zeros((3, 2, 3, 3), np.uint8)
    shards.gather(np.array([2, 0, 1]), out)
    np.testing.assert_array_equal(out, golden_array()[[2, 0, 1]])


def test_the_same_samples_give_the_golden_bytes_again(tmp_path: Path) -> None:
    out = tmp_path / "again"
    with ShardWriter(out, (2, 3, 3), classes=["cat", "dog"], shard_nbytes=4096 + 2 * 18) as writer:
        for i, pixels in enumerate(golden_array()):
            size = (GOLDEN_HEIGHTS[i], GOLDEN_WIDTHS[i])
            writer.append(pixels, GOLDEN_LABELS[i], key=GOLDEN_KEYS[i], source_size=size)
    assert {path.name for path in out.iterdir()} == set(GOLDEN_SHA256)
    # Not the manifest: it names the version of the package that wrote it.
    for name in set(GOLDEN_SHA256) - {"manifest.json"}:
        assert (out / name).read_bytes() == (GOLDEN / name).read_bytes(), name
    assert load_manifest(out).digest == GOLDEN_DIGEST
