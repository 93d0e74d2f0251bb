"""Arrays, orders of stored rows, and what no manifest may say of them."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manifests import Document, dump, refused, seal
from places import DATA

from shardio.conversion.writing.set_writer import ShardWriter
from shardio.errors import FormatError
from shardio.format.layout import ARRAY_TYPES, HEADER_NBYTES, RESERVED_NAMES, ArrayKind, RowType
from shardio.format.manifest import Manifest, parse_manifest
from shardio.format.manifest_file import commit_manifest, load_manifest
from shardio.reading.shardset import open_shards
from shardio.sets.rows import ArrayWriter, write_index, write_order
from shardio.sets.verify import verify

GOLDEN = DATA / "golden-arrays"
"""Three samples in three stored rows, one of which none of them uses, with four arrays. No test writes here."""
GOLDEN_DIGEST = "6fcd5c286740a26a7dbdf0560697ace8c68dd31aa20c086763bc15ebd7fdd188"
GOLDEN_SHA256 = {
    "manifest.json": "2f76656a60a65be92556114c46d15c93994f00498054c2c941b90fa46d04f748",
    "train-00000.npy": "2e4687c0088ddcaedca680c63dce0cb9f2e1bda4a96baac8f08c048d905f6e89",
    "train-00001.npy": "04495d06aa479de349eb59693b697c5977df765f3e0d61a98072b0b1e7ac495d",
    "train-clip-00000.npy": "2d15ba819d7c02db5655b0eb14d791601138f328cfb96b5d1c5ad8780ff2efc1",
    "train-clip-00001.npy": "98e39cd0b96535cf06d10ce4edfa923f496b86e26f2bb04eb6bcda5e11178992",
    "train-clip-crc32.npy": "bb85ac1ed0700292647667f6d0226763f295bcddf98b015aad8f371b819d2513",
    "train-index.npy": "2118ff55ec8c35a1433955ea27e97be1583e151635c3e3b45a962b6c519f8254",
    "train-mask-crc32.npy": "6b5206ae3ee5bb34fb1c30e652f27c456bdbd2e5c0c1587cb9938f8f50e982ce",
    "train-mask.npy": "dd23f9c1c4d5f50e6f98526829122f7964ae0b50a143fc0b1841b15e7686af27",
    "train-order-0.npy": "1bcf9d9da1b2e050af286f2928e3d391eeb7e21b78bcc2ac4a3c965335f8a9e3",
    "train-score-crc32.npy": "27e2cbf62f501e1d5f9f8dcdead751230d3a2a603059eb4c08285fd2db53fd1c",
    "train-score.npy": "784c1ccc9491a18bcbed3596777c8350fbd6d29e60b13a95d17f46bb373f118a",
    "train-year-crc32.npy": "a6e19a7cf0b3c4e15f6f86b010bf7b005b773c9fb777045b38f783919aa064e6",
    "train-year.npy": "6395631fe455bbe5fb6b5b1c1ff18a0d297f84a335791a5a71d87e03df43d4b0",
}
ORDER = (2, 0, 2)
"""The stored row of each sample, for the pixels, the mask and the year."""
MASKS = ((0, 0, 0, 1, 1, 1), (9, 9, 9, 9, 9, 9), (2, 2, 0, 255, 0, 0))
YEARS = (2009, -1, 1 << 40)
CLIP = ((1.0, -2.0) * 6, (0.5, 65504.0) * 6, (0.0, 0.099976) * 6)
SCORES = (0.75, math.nan, -math.inf)
"""A value for each sample: these arrays have no order."""

# --- the bytes -------------------------------------------------------------------------------------------------------


def write_golden(out: Path) -> Manifest:
    stored = np.load(DATA / "golden" / "train-index.npy")
    pixels = np.concatenate([np.load(DATA / "golden" / f"train-0000{number}.npy") for number in range(2)])
    names: dict[str, Any] = {"classes": ["cat", "dog"], "class_names": ["Egyptian cat", "golden retriever"]}
    with ShardWriter(out, (2, 3, 3), **names, shard_nbytes=4096 + 2 * 18) as writer:
        for row, picture in zip(stored, pixels, strict=True):
            size = (row["source_height"], row["source_width"])
            writer.append(picture, int(row["label"]), key=bytes(row["key"]), source_size=size)
    manifest = load_manifest(out)
    given: dict[str, tuple[ArrayKind, np.ndarray[Any, Any]]] = {
        "mask": ("mask", np.array(MASKS, "|u1").reshape(3, 2, 3)),
        "clip": ("array", np.array(CLIP, "<f2")),
        "score": ("array", np.array(SCORES, "<f8")),
        "year": ("array", np.array(YEARS, "<i8")),
    }
    arrays = {}
    for name, (kind, values) in given.items():
        row = RowType(values.dtype.str, values.shape[1:])
        # Two rows a file at most, unless the array is small.
        array = ArrayWriter(out, "train", name, kind, row, HEADER_NBYTES + 2 * row.nbytes)
        array.append(values)
        arrays[name] = replace(array.finish(), order=0 if name in ("mask", "year") else None)
    order = np.array(ORDER)
    train = replace(
        manifest.splits["train"],
        index=write_index(out, "train", stored[order]),
        orders=(write_order(out, "train", 0, order),),
        order=0,
        arrays=arrays,
    )
    manifest = replace(manifest, splits={"train": train}, provenance={})
    commit_manifest(out, manifest)
    return manifest


def test_golden_files_are_the_published_ones() -> None:
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in GOLDEN.iterdir()} == GOLDEN_SHA256


def test_the_same_arrays_and_order_give_the_golden_bytes_again(tmp_path: Path) -> None:
    write_golden(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(GOLDEN_SHA256)
    for name in GOLDEN_SHA256:
        assert (tmp_path / "out" / name).read_bytes() == (GOLDEN / name).read_bytes(), name


def test_golden_set_opens_with_these_samples() -> None:
    shards = open_shards(GOLDEN)
    assert (len(shards), shards.digest) == (3, GOLDEN_DIGEST)
    stored = np.load(DATA / "golden" / "train-index.npy")
    pixels = np.concatenate([np.load(DATA / "golden" / f"train-0000{number}.npy") for number in range(2)])
    for i, row in enumerate(ORDER):
        np.testing.assert_array_equal(shards[i].image, pixels[row])
        assert shards[i].label == stored["label"][row]
        assert shards[i].arrays["mask"].ravel().tolist() == list(MASKS[row])
        assert shards[i].arrays["year"] == YEARS[row]
        np.testing.assert_array_equal(shards[i].arrays["clip"], np.array(CLIP[i], np.float16))
        np.testing.assert_array_equal(shards[i].arrays["score"], SCORES[i])
    assert shards.class_names == ("Egyptian cat", "golden retriever")
    assert verify(GOLDEN).ok
    for name in ("golden", "golden-arrays"):
        data = (DATA / name / "manifest.json").read_bytes()
        assert parse_manifest(data).dumps() == data


# --- the manifest ----------------------------------------------------------------------------------------------------


def document() -> Document:
    parsed: Document = json.loads((GOLDEN / "manifest.json").read_bytes())
    parsed["provenance"] = {"by": "x"}
    return parsed


def expect(change: Callable[[Document], object], text: str) -> None:
    changed = document()
    change(changed["splits"]["train"])
    message = refused(dump(seal(changed)))
    assert text in message, message


@pytest.mark.parametrize("dtype", ARRAY_TYPES)
def test_every_type_that_is_allowed_is_taken(dtype: str) -> None:
    changed = document()
    clip = changed["splits"]["train"]["arrays"]["clip"]
    clip["dtype"] = dtype
    for shard in clip["shards"]:
        shard["nbytes"] = 4096 + shard["num_samples"] * 12 * np.dtype(dtype).itemsize
    assert parse_manifest(dump(seal(changed))).splits["train"].arrays["clip"].row == RowType(dtype, (12,))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("mask", "a mask must have the samples' height and width (2, 3)"),
        ("image", "an array's kind must be one of"),
    ],
)
def test_a_kind_fits_its_shape_and_type(kind: str, text: str) -> None:
    expect(lambda train: train["arrays"]["clip"].update(kind=kind), f"splits.train.arrays.clip: {text}")
    changed = document()
    changed["splits"]["train"]["arrays"]["mask"]["kind"] = "array"  # which fits everything
    parse_manifest(dump(seal(changed)))


def test_orders_are_used_and_exist() -> None:
    def without(train: Document) -> None:
        for holder in (train, *train["arrays"].values()):
            holder.pop("order", None)

    expect(without, "to use each of the 1 `orders`, found that they use the orders []")
    expect(lambda train: train.update(order=1), "they use the orders [0, 1]")
    expect(lambda train: train["arrays"]["mask"].update(order=7), "they use the orders [0, 7]")
    expect(lambda train: train.pop("orders"), "without `order`, found that they use the orders [0]")
    again = {"file": "again.npy", "nbytes": 4096 + 24, "sha256": "0" * 64}
    expect(lambda train: train["orders"].append(again), "each of the 2 `orders`, found that they use the orders [0]")
    expect(lambda train: train["orders"][0].update(nbytes=4096 + 32), "train-order-0.npy: nbytes: expected 4120")


def test_sums_and_sizes_agree() -> None:
    expect(lambda train: train["arrays"]["clip"]["shards"].pop(), "arrays.clip: expected values for 3 samples, found 2")
    expect(lambda train: train["arrays"]["clip"]["crc32"].update(nbytes=4104), "clip-crc32.npy: nbytes: expected 4108")
    expect(lambda train: train["arrays"]["clip"]["shards"][0].update(nbytes=4096), "clip-00000.npy: nbytes: expected")
    expect(lambda train: train["arrays"]["mask"]["shards"][0].update(num_samples=2), "train-mask.npy: nbytes: expected")
    expect(lambda train: train["arrays"]["clip"].update(shape=[13]), "clip-00000.npy: nbytes: expected 4148")
    expect(lambda train: train["shards"].clear(), "splits.train.shards: expected at least one shard")
    expect(lambda train: train.update(num_samples=4), "train-index.npy: nbytes")
    # Without an order there is a stored row for each sample.
    changed = document()
    train = changed["splits"]["train"]
    train["shards"].pop()
    parse_manifest(dump(seal(changed)))  # a stored row that is not there is found when it is read
    del train["order"]
    assert "num_samples: expected 2, as many as in the shards, found 3" in refused(dump(seal(changed)))


@pytest.mark.parametrize(
    "name", [*sorted(RESERVED_NAMES), "INDEX", "", "1st", "a-b", "a.b", "../x", "x" * 65, "x" * 9999, "\ud800"]
)
def test_an_array_has_a_name_of_its_own(name: str) -> None:
    expect(lambda train: train["arrays"].update({name: train["arrays"].pop("clip")}), "splits.train.arrays: an array")


def test_there_are_at_most_fifty_arrays() -> None:
    def change(train: Document) -> None:
        for number in range(49):
            array = copy.deepcopy(train["arrays"]["clip"])
            for file in (array["crc32"], *array["shards"]):
                file["file"] = f"{number}-{file['file']}"
            train["arrays"][f"a{number}"] = array

    expect(change, "splits.train.arrays: expected at most 50 arrays, found")


def test_manifests_made_in_memory_are_checked_too() -> None:
    manifest = parse_manifest(dump(document()))
    train = manifest.splits["train"]
    arrays: list[tuple[str, dict[str, Any]]] = [
        ("to use each of the 2 `orders`", {"orders": (*train.orders, replace(train.orders[0], file="again.npy"))}),
        ("found this name twice", {"arrays": {**train.arrays, "again": train.arrays["mask"]}}),
        ("an array's name must not be", {"arrays": {"pixels": train.arrays["mask"]}}),
        ("kind must be one of", {"arrays": {"mask": replace(train.arrays["mask"], kind="masks")}}),
    ]
    for text, changes in arrays:
        with pytest.raises(FormatError, match=text):
            replace(manifest, splits={"train": replace(train, **changes)})
