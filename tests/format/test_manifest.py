"""manifest.json: any bytes in it give a sound manifest or one clear FormatError.

`document` has everything that a manifest may have: class names, arrays, an order, refused sources.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import must_not_block
from manifests import (
    BAD_NAMES,
    NO_COUNT,
    NO_LIST,
    NO_OBJECT,
    NO_SHA256,
    NO_STRING,
    Document,
    JsonPath,
    at,
    dump,
    mutate_bytes,
    mutate_value,
    name_of,
    paths,
    put,
    refused,
    seal,
    sha,
)
from places import DATA, ROOT

from shardio.errors import LONGEST_LINE, ConvertError, FormatError, SetNotFoundError
from shardio.format.entries import IndexEntry, RejectsEntry, ShardEntry, SplitEntry
from shardio.format.layout import ARRAY_TYPES, RESERVED_NAMES, RowType
from shardio.format.manifest import Manifest, parse_manifest
from shardio.format.manifest_file import check_names_fit, commit_manifest, load_manifest


def document() -> Document:
    """golden-arrays, and a second split. Samples have (2, 3, 3) = 18 bytes."""
    full: Document = json.loads((DATA / "golden-arrays" / "manifest.json").read_bytes())
    full["splits"]["train"]["squashed"] = True
    full["splits"]["val"] = {
        "num_samples": 1,
        "index": {"file": "val-index.npy", "nbytes": 4096 + 24, "sha256": sha("vi"), "key_nbytes": 4},
        "shards": [{"file": "val-00000.npy", "nbytes": 4096 + 18, "sha256": sha("v0"), "num_samples": 1}],
    }
    full |= {"classes": ["cat", "d\u00f6g \U0001f42d"], "class_names": ["crane", "crane"]}
    full["rejects"] = {"file": "rejects.jsonl", "nbytes": 77, "sha256": sha("r"), "num_rejects": 2}
    full["provenance"] = {"shardio": "0.1.0", "conversion": {"size": [2, 3], "share": 0.5, "seed": None}}
    return seal(full)


def latents() -> Document:
    """golden-latents, which has no pixels."""
    found: Document = json.loads((DATA / "golden-latents" / "manifest.json").read_bytes())
    return found


MANIFEST = parse_manifest(dump(document()))
DIGEST = document()["digest"]


def sealed_refused(path: JsonPath, value: object) -> str:
    """How the document is refused with another value there, and the right digest."""
    return refused_after(lambda changed: put(changed, path, value))


def refused_after(change: Callable[[Document], object], base: Callable[[], Document] = document) -> str:
    changed = base()
    change(changed)
    return refused(dump(seal(changed)))


# --- values and bytes ------------------------------------------------------------------------------------------------


def test_a_manifest_comes_back_as_it_was() -> None:
    golden = [path.read_bytes() for path in DATA.glob("golden*/manifest.json")]
    assert len(golden) == 3
    for data in (MANIFEST.dumps(), *golden):
        manifest = parse_manifest(data)
        assert manifest.dumps() == data
        assert data.isascii()
        assert json.loads(data) == seal(json.loads(data))
        assert manifest.digest == json.loads(data)["digest"]
    assert parse_manifest(MANIFEST.dumps()) == MANIFEST
    assert MANIFEST.class_names == ("crane", "crane")
    assert (MANIFEST.num_rejects, replace(MANIFEST, rejects=None).num_rejects) == (2, 0)


def test_commit_publishes_what_load_reads(tmp_path: Path) -> None:
    commit_manifest(tmp_path, MANIFEST)
    assert os.listdir(tmp_path) == ["manifest.json"]
    assert load_manifest(tmp_path) == load_manifest(str(tmp_path)) == MANIFEST
    assert (tmp_path / "manifest.json").read_bytes() == MANIFEST.dumps()


def shuffled(rng: random.Random, value: Any) -> Any:
    """Returns the same JSON with the keys of all objects in another order."""
    if isinstance(value, dict):
        items = list(value.items())
        rng.shuffle(items)
        return {key: shuffled(rng, child) for key, child in items}
    return [shuffled(rng, child) for child in value] if isinstance(value, list) else value


def test_the_digest_names_content_and_neither_provenance_nor_the_order_of_keys() -> None:
    assert replace(MANIFEST, provenance={"by": "somebody else"}).digest == DIGEST
    for seed in range(20):
        again = parse_manifest(dump(shuffled(random.Random(seed), document())))
        assert (again, again.digest, again.dumps()) == (MANIFEST, DIGEST, MANIFEST.dumps())


@pytest.mark.parametrize(("num_classes", "num_shards"), [(3, 1), (10, 3000), (2000, 1000)])
def test_the_size_of_a_manifest_is_foreseen_and_not_more_than_a_fifth_too_large(
    num_classes: int, num_shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = tuple(f"n{i:08d} \u00e9" for i in range(num_classes))
    row = RowType("|u1", (2, 3, 3))
    shards = tuple(ShardEntry(f"train-{i:05d}.npy", 4096 + 7 * 18, sha(str(i)), 7, row) for i in range(num_shards))
    index = IndexEntry("train-index.npy", 4096 + 7 * num_shards * 32, sha("i"), 12)
    manifest = Manifest((2, 3, 3), classes, {"train": SplitEntry(7 * num_shards, index, shards)})
    found: list[int] = []
    monkeypatch.setattr("shardio.format.manifest_file._check_room", lambda nbytes, *others: found.append(nbytes))
    check_names_fit(classes, (), [shard.file for shard in shards])
    assert len(manifest.dumps()) - 1000 < found[0] < 1.2 * len(manifest.dumps())


def test_a_manifest_that_no_reader_takes_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.format.manifest_file.MAX_MANIFEST_NBYTES", len(MANIFEST.dumps()))
    commit_manifest(tmp_path, MANIFEST)
    other = replace(MANIFEST, classes=("cat", "dog and a longer name than before"))
    with pytest.raises(ConvertError, match=r"manifest\.json.* for 2 classes and 3 shards"):
        commit_manifest(tmp_path, other)
    assert load_manifest(tmp_path) == MANIFEST


# --- keys ------------------------------------------------------------------------------------------------------------

_RECORDS: list[JsonPath] = [
    (),
    ("rejects",),
    ("splits", "train"),
    ("splits", "val"),
    ("splits", "train", "index"),
    ("splits", "train", "shards", 0),
    ("splits", "train", "shards", 1),
    ("splits", "train", "orders", 0),
    ("splits", "train", "arrays", "mask"),
    ("splits", "train", "arrays", "clip"),
    ("splits", "train", "arrays", "mask", "crc32"),
    ("splits", "train", "arrays", "clip", "shards", 1),
]
_OPTIONAL = {"class_names", "rejects", "squashed", "orders", "order", "arrays"}


def test_every_key_is_needed() -> None:
    for path in _RECORDS:
        for key in set(at(document(), path)) - _OPTIONAL:
            changed = document()
            del at(changed, path)[key]
            message = refused(dump(changed if path == () else seal(changed)))
            assert key in message, message
            # The name and the version of the format are looked at before anything else.
            assert "without" in message or key in ("format", "format_version"), message


def test_no_other_key_is_taken() -> None:
    for path, key in product(_RECORDS, ("extra", "", "File", "sha256 ", "__class__", "\ud800")):
        changed = document()
        at(changed, path)[key] = "x"
        message = refused(dump(seal(changed)))
        assert "with the unknown" in message, message
        assert repr(key) in message, message


def test_repeated_keys_are_refused_by_name() -> None:
    for path in (*_RECORDS, ("splits",), ("provenance",)):
        inner = json.dumps(at(document(), path))
        assert inner in json.dumps(document())
        key = sorted(at(document(), path))[-1]
        repeated = "{" + f"{json.dumps(key)}: 0, " + inner[1:]
        message = refused(json.dumps(document()).replace(inner, repeated, 1).encode())
        assert "distinct keys" in message, message
        assert key in message, message


# --- types -----------------------------------------------------------------------------------------------------------

_WRONG: dict[str, list[object]] = {
    "class_names": [*NO_LIST, [], ["crane"], ["a", "b", "c"]],
    "orders": [*NO_LIST, []],
    "order": NO_COUNT,
    "arrays": [*NO_OBJECT, {}],
    "crc32": NO_OBJECT,
    **dict.fromkeys(("mask", "clip", "score", "year"), NO_OBJECT),
    "kind": [*NO_STRING, "", "Mask", "mask ", "boxes", "keypoints"],
    "dtype": [
        *(*NO_STRING, "", "u1", "<u1", "|O", "|O8", ">f4", ">i8", "<f16", "<c8"),
        *("|S4", "<U4", "|V4", "<M8[s]", "f4"),
    ],
    "shape": [*NO_LIST, [0], [-1], [1.0], [True], ["2"], [None], [[2]], [65537], [1] * 9, [10**30], [65536] * 8],
    "squashed": [False, None, 1, "true", []],
    "nbytes": NO_COUNT,
    "num_rejects": [*NO_COUNT, 0],
    "num_samples": [*NO_COUNT, 0],
    "key_nbytes": [*NO_COUNT, 0, 1, 3, 5, 8, 16, 65540],
    "file": BAD_NAMES,
    "sha256": NO_SHA256,
    "shards": NO_LIST,
    "classes": NO_LIST,
    "index": NO_OBJECT,
    "rejects": NO_OBJECT,
    "splits": NO_OBJECT,
    "provenance": NO_OBJECT,
    "train": NO_OBJECT,
    "val": NO_OBJECT,
    "sample_shape": [*(value for value in NO_LIST if value is not None), [], [2], [2, 3], [2, 3, 3, 1]],
    "format": [*NO_STRING, "", "Shardio", "shardio ", "x"],
    "format_version": [*NO_COUNT, 0, 1, 3, 10**6],
}


def _typed_places() -> list[tuple[JsonPath, list[object]]]:
    places: list[tuple[JsonPath, list[object]]] = []
    for path in paths(document()):
        if path[:1] in (("classes",), ("class_names",)) and len(path) == 2:
            places.append((path, NO_STRING))
        elif path[:1] == ("sample_shape",) and len(path) == 2:
            places.append((path, [*NO_COUNT, 0, 65537]))
        elif path and (path[0] != "provenance" or len(path) == 1) and path[-1] in _WRONG:
            places.append((path, _WRONG[str(path[-1])]))
        elif path[-2:-1] in (("shards",), ("orders",)):
            places.append((path, NO_OBJECT))
    return places


def test_every_field_is_among_the_typed_places() -> None:
    untyped = set(paths(document())) - {path for path, _ in _typed_places()}
    untyped = {path for path in untyped if not {"provenance", "shape"} & set(path)}
    assert untyped == {(), ("digest",)}


def test_wrong_values_are_refused_by_field() -> None:
    for path, value in [(place, value) for place, wrong in _typed_places() for value in wrong]:
        message = sealed_refused(path, copy.deepcopy(value))
        field = "sample_shape" if path[0] == "sample_shape" else name_of(path)
        field = name_of(path[:-1]) if path[-1] in ("kind", "dtype", "shape") else field
        assert message.startswith(field), f"{value!r}: {message}"
        found = repr(value) if isinstance(value, (str, int, float, type(None))) else ""
        assert found[:70] in message, f"{value!r}: {message}"


@pytest.mark.parametrize("dtype", ARRAY_TYPES)
def test_every_type_that_is_allowed_is_taken(dtype: str) -> None:
    changed = document()
    clip = changed["splits"]["train"]["arrays"]["clip"]
    clip["dtype"] = dtype
    for shard in clip["shards"]:
        shard["nbytes"] = 4096 + shard["num_samples"] * 12 * np.dtype(dtype).itemsize
    assert parse_manifest(dump(seal(changed))).splits["train"].arrays["clip"].row == RowType(dtype, (12,))


# To a schema, 1.0 is an integer. It sees neither products nor that two lists have one length.
_UNSEEN = {repr(value) for value in (1.0, [1.0], [65536] * 8, ["crane"], ["a", "b", "c"])}


def test_the_schema_accepts_valid_manifests_and_refuses_wrong_values() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    found = json.loads((ROOT / "docs" / "manifest.schema.json").read_bytes())
    jsonschema.Draft202012Validator.check_schema(found)
    schema = jsonschema.Draft202012Validator(found)
    golden = [json.loads(path.read_bytes()) for path in DATA.glob("golden*/manifest.json")]
    for manifest in (*golden, document()):
        assert [error.message for error in schema.iter_errors(manifest)] == []
    seen = set[object]()
    for path, wrong in _typed_places():
        for value in wrong[:2] if path[-1] in seen else wrong:  # a field has one definition, in whatever file's entry
            changed = document()
            put(changed, path, value)
            assert repr(value) in _UNSEEN or not schema.is_valid(changed), (path, value)
        seen.add(path[-1])


def test_a_wrong_digest_is_refused() -> None:
    for value in (None, True, 1, "", "0" * 64, "A" * 64, [], {}, ["x"]):
        message = refused(dump({**document(), "digest": value}))
        assert message.startswith(f"digest: expected {DIGEST}"), message
        assert repr(value) in message


def test_bad_split_names_are_refused() -> None:
    for name in (name for name in BAD_NAMES if isinstance(name, str)):
        changed = document()
        changed["splits"][name] = changed["splits"].pop("train")
        message = refused(dump(seal(changed)))
        assert message.startswith("splits: expected a name"), message
        assert repr(name)[:70] in message


@pytest.mark.parametrize(
    "name", [*sorted(RESERVED_NAMES), "INDEX", "", "1st", "a-b", "a.b", "../x", "x" * 65, "x" * 9999, "\ud800"]
)
def test_bad_names_of_arrays_are_refused(name: str) -> None:
    arrays = document()["splits"]["train"]["arrays"]
    arrays[name] = arrays.pop("clip")
    assert sealed_refused(("splits", "train", "arrays"), arrays).startswith("splits.train.arrays: an array")


def test_any_text_is_a_class_name() -> None:
    for name in ("", "a/b", "../x", "a\0b", "\udc80", "\udcff", "x" * 10_000, "n01440764", "\u00fc"):
        changed = seal({**document(), "classes": ["x", name]})
        assert parse_manifest(dump(changed)).classes == ("x", name)
    for key in ("classes", "class_names"):
        for name in ("\ud800", "a\udc7fb", "\udfff"):
            assert sealed_refused((key,), [name, "x"]).startswith(f"{key}[0]: expected valid Unicode text")
    without = seal({**latents(), "classes": []})
    assert parse_manifest(dump(without)).classes == ()


# --- parts that contradict each other --------------------------------------------------------------------------------


def _file_places() -> list[JsonPath]:
    return [path for path in paths(document()) if path and path[-1] == "file"]


@pytest.mark.parametrize("change", [str, str.upper, str.title])
def test_no_two_files_have_one_name_even_in_another_case(change: Callable[[str], str]) -> None:
    names = {path: at(document(), path) for path in _file_places()}
    for path in names:
        for name in {*names.values(), "manifest.json"} - {names[path]}:
            message = sealed_refused(path, change(name))
            assert "found this name twice" in message, message
            assert name.lower() in message.lower(), message


def _without_orders(train: Document) -> None:
    for holder in (train, *train["arrays"].values()):
        holder.pop("order", None)


def _with_many_arrays(train: Document) -> None:
    for number in range(49):
        array = copy.deepcopy(train["arrays"]["clip"])
        for file in (array["crc32"], *array["shards"]):
            file["file"] = f"{number}-{file['file']}"
        train["arrays"][f"a{number}"] = array


_FILE = {"file": "again.npy", "nbytes": 4096 + 24, "sha256": "0" * 64}
_OF_TRAIN: list[tuple[Callable[[Document], object], str]] = [
    (_without_orders, "to use each of the 1 `orders`, found that they use the orders []"),
    (lambda train: train.update(order=1), "they use the orders [0, 1]"),
    (lambda train: train["arrays"]["mask"].update(order=7), "they use the orders [0, 7]"),
    (lambda train: train.pop("orders"), "without `order`, found that they use the orders [0]"),
    (lambda train: train["orders"].append(_FILE), "each of the 2 `orders`, found that they use the orders [0]"),
    (lambda train: train["orders"][0].update(nbytes=4096 + 32), "train-order-0.npy: nbytes: expected 4120"),
    (lambda train: train["arrays"]["clip"].update(kind="mask"), "clip: a mask must have the samples' height and"),
    (lambda train: train["arrays"]["clip"]["shards"].pop(), "clip: expected values for 3 samples, found 2"),
    (lambda train: train["arrays"]["clip"]["crc32"].update(nbytes=4104), "clip-crc32.npy: nbytes: expected 4108"),
    (lambda train: train["arrays"]["clip"].update(shape=[13]), "clip-00000.npy: nbytes: expected 4148"),
    (lambda train: train["shards"].clear(), "splits.train.shards: expected at least one shard"),
    (lambda train: train.update(num_samples=4), "train-index.npy: nbytes"),
    (_with_many_arrays, "splits.train.arrays: expected at most 50 arrays, found"),
]
_OF_VAL: list[tuple[Callable[[Document], object], str]] = [
    (lambda val: val.update(num_samples=4), "val.num_samples: expected 1, as many as in the shards, found 4"),
    (lambda val: val["shards"].clear(), "val.num_samples: expected 0, as many as in the shards, found 1"),
    (lambda val: val["shards"][0].update(nbytes=4115), "val-00000.npy: nbytes: expected 4114, found 4115"),
    (lambda val: val["index"].update(key_nbytes=12), "val, val-index.npy: nbytes: expected 4128, found 4120"),
]
_WHOLE: list[tuple[Callable[[Document], object], str]] = [
    (lambda whole: whole.update(splits={}), "splits: expected at least one split, found none"),
    (lambda whole: whole.update(classes=["dog", "dog"]), "classes: expected distinct names, found 'dog' twice"),
    (lambda whole: whole.update(classes=[]), "class_names: expected 0 names, one for each class, found 2"),
    *(
        (lambda whole, value=value: whole.update(pixels=value), "pixels: pixels must be one of rgb, yuv420")
        for value in (None, "jpeg", {}, 1)
    ),
    (lambda whole: whole.update(pixels="rgb"), "pixels: expected no key"),  # so a content has one text
]
_OF_LATENTS: list[tuple[Callable[[Document], object], str]] = [
    (lambda train: train["index"].pop("label"), "nbytes"),
    (lambda train: train["index"].update(label=True), "label: expected false"),
    (lambda train: train["arrays"]["labels"].update(dtype="<f8"), "labels: labels must be .* float32"),
    (lambda train: train["arrays"]["labels"].update(shape=[1, 2]), "vector"),
    (lambda train: train["arrays"]["latent"].update(kind="mask"), "without pixels"),
    (lambda train: [train["arrays"].pop(name) for name in ("latent", "year")], "arrays.*without pixels"),
    (lambda train: train.update(shards=[{**_FILE, "nbytes": 4105, "num_samples": 3}]), "without pixels"),
    (lambda train: train.update(squashed=True), "without pixels"),
]


def test_parts_that_contradict_each_other_are_refused() -> None:
    for name, rows in (("train", _OF_TRAIN), ("val", _OF_VAL)):
        for change, text in rows:
            message = refused_after(lambda whole, name=name, change=change: change(whole["splits"][name]))
            assert message.startswith(f"splits.{name}"), message
            assert text in message, message
    for change, text in _WHOLE:
        message = refused_after(change)
        assert text in message, message
    for change, text in _OF_LATENTS:
        message = refused_after(lambda whole, change=change: change(whole["splits"]["train"]), latents)
        assert re.search(text, message), message
    assert "shards" in refused_after(lambda whole: whole.update(sample_shape=[1, 1, 3]), latents)


def test_an_order_may_name_a_stored_row_that_is_not_there() -> None:
    """That is found when it is read."""
    changed = document()
    changed["splits"]["train"]["shards"].pop()
    parse_manifest(dump(seal(changed)))


def test_manifests_made_in_memory_are_checked_too() -> None:
    train = MANIFEST.splits["train"]
    mask = train.arrays["mask"]
    for text, changes in (
        ("expected 1, as many as in the shards, found 2", {"val": replace(MANIFEST.splits["val"], num_samples=2)}),
        (
            "to use each of the 2 `orders`",
            {"train": replace(train, orders=(*train.orders, replace(train.orders[0], file="again.npy")))},
        ),
        ("found this name twice", {"train": replace(train, arrays={**train.arrays, "again": mask})}),
        ("an array's name must not be", {"train": replace(train, arrays={"pixels": mask})}),
        ("kind must be one of", {"train": replace(train, arrays={"mask": replace(mask, kind="masks")})}),  # type: ignore[arg-type]
    ):
        with pytest.raises(FormatError, match=text):
            replace(MANIFEST, splits=changes)
    with pytest.raises(ValueError, match=r"must be \(height, width, channels\).*found \(0, 3, 3\)"):
        replace(MANIFEST, sample_shape=(0, 3, 3))
    with pytest.raises(FormatError, match=r"'train-index.npy': expected file names that differ in more than case"):
        replace(MANIFEST, rejects=RejectsEntry("train-index.npy", 77, sha("r"), 2))


@pytest.mark.parametrize(("version", "word"), [(1, "convert"), (3, "newer")])
def test_another_version_is_named_whatever_else_it_has(version: int, word: str) -> None:
    message = refused(dump({"format": "shardio", "format_version": version, "pages": [{}]}))
    assert "format_version: expected 2" in message
    assert word in message


# --- bytes that are no manifest --------------------------------------------------------------------------------------


def test_other_bytes_are_refused() -> None:
    for data in (
        b"",
        b" \n",
        b"{",
        b"}",
        b"{}",
        b"[]",
        b"0",
        b"null",
        b'"shardio"',
        b"\0",
        b"\x93NUMPY\x01\x00",
        b"\xff\xfe{\0}\0",
        b"\xef\xbb\xbf{}",
        b"{'format': 'shardio'}",
        b'{"format": "shardio",}',
        b'{"format": "shardio"} {}',
        b'{"format": "shardio", "format_version": 2} // x',
        b"NaN",
        b"<html>404 Not Found</html>",
        "{\u00fc}".encode(),
        b'{"format": "shardio", "format_version": ' + b"1" * 100_000 + b"}",
        b'{"format": "shardio", "format_version": ' + b"1" * 4_000 + b"}",
        b'{"format": "shardio", "format_version": 1e999}',
        b'{"format": "shardio", "format_version": -0.0}',
        b'{"format": "' + b"x" * 1_000_000 + b'"}',
    ):
        refused(data)


_BEYOND = {
    **dict.fromkeys(("NaN", "Infinity", "-Infinity"), "expected only finite numbers, found "),
    "1e999": "numbers in the range of float64, found '1e999'",
    "-1e999": "numbers in the range of float64, found '-1e999'",
    "1" * 4301: "integers of at most 4300 digits, found one with 4301",
    r'"\ud800"': r"lone surrogates U+DC80 to U+DCFF, found '\ud800'",
    r'"\udc7f"': r"found '\udc7f'",
    r'"x\udd00x"': r"found 'x\udd00x'",
    r'"\udfff"': r"found '\udfff'",
    r'"\ude00\ud83d"': r"found '\ude00\ud83d'",
    r'{"\ud800": 1}': r"found '\ud800'",
    r'[[{"a": ["\ud800"]}]]': r"found '\ud800'",
    "[" * 100 + "]" * 100: "at most 100 levels",
    '{"x":' * 100 + "0" + "}" * 100: "at most 100 levels",
}


def test_a_provenance_that_could_not_be_written_or_shown_again_is_refused() -> None:
    for value, expected in _BEYOND.items():
        changed = document()
        changed["provenance"] = "HERE"
        assert expected in refused(dump(changed).replace(b'"HERE"', f'{{"x": {value}}}'.encode()))


def test_a_provenance_that_is_taken_comes_back_from_what_is_written_of_it() -> None:
    for value in (
        *("1e308", "-0.0", "1e-999", "1" * 4300, "-" + "1" * 4299, '"\\udc80\\udcff"', '"\\ud83d\\ude00"', '"\\u0000"'),
        *("[" * 99 + "]" * 99, '{"x":' * 99 + "0" + "}" * 99),
    ):
        changed = document()
        changed["provenance"] = "HERE"
        manifest = parse_manifest(dump(changed).replace(b'"HERE"', f'{{"x": {value}}}'.encode()))
        assert parse_manifest(manifest.dumps()) == manifest, value


@pytest.mark.parametrize(
    "changes",
    [
        {"provenance": {"x": float("inf")}},
        {"provenance": {"x": float("nan")}},
        {"provenance": {"x": "\ud800"}},
        {"classes": ("\ud800", "b")},
        {"classes": (1, "b")},
    ],
    ids=str,
)
def test_what_no_reader_could_open_is_not_published(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"manifest\.json: .*expected .*; nothing is published$"):
        commit_manifest(tmp_path, replace(MANIFEST, **changes))
    assert os.listdir(tmp_path) == []


def test_every_prefix_is_refused() -> None:
    data = MANIFEST.dumps()
    complete = len(data.rstrip())
    for length in range(complete):
        refused(data[:length])
    assert parse_manifest(data[:complete]) == MANIFEST


@pytest.mark.parametrize("bracket", ["[", '{"x":', "[[", '[{"x":'])
def test_a_hundred_thousand_brackets_are_refused(bracket: str) -> None:
    for text in (bracket * 100_000, dump(document()).decode().replace('"train": ', '"train": ' + bracket * 100_000)):
        refused(text.encode())


def test_no_depth_of_nesting_gets_through_or_breaks_anything() -> None:
    """Around the depth that the JSON parser just takes, the checks and messages behind it must not run out of stack."""
    values = ("format", "format_version", "sample_shape", "classes", "digest", "splits", "rejects", "provenance")
    for path in [
        *((key,) for key in values),
        ("classes", 0),
        ("sample_shape", 0),
        ("splits", "train", "shards", 0, "file"),
    ]:
        changed = document()
        put(changed, path, "HERE")
        before, after = dump(changed).split(b'"HERE"')
        for depth in (1, 2, 18, 19, *range(900, 1010, 2)):
            # Another test checks the length of messages.
            refused(before + b"[" * depth + b"]" * depth + after, most_characters=10_000)


def test_messages_stay_short_whatever_was_found() -> None:
    values = ("x" * 10_000, ["x" * 10_000] * 2, {"x" * 10_000: 0}, int("1" * 4000))
    for path, value in product([path for path in paths(document()) if path], values):
        changed = document()
        put(changed, path, value)
        try:  # some values are any text
            parse_manifest(dump(seal(changed)))
        except FormatError as error:
            assert len(str(error)) <= LONGEST_LINE  # noqa: PT017


def test_the_message_about_many_or_long_keys_is_short() -> None:
    refused(dump({**document(), "rejects": {f"key{i}": 0 for i in range(100_000)}}))
    keys = ", ".join(f'"{"x" * 10_000}{i}": 0' for i in range(20))
    refused(dump(document()).replace(b"{", b"{" + f'{keys}, "digest": 0, '.encode(), 1))


# --- mutations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [document, latents])
@pytest.mark.parametrize("seed", range(3))
def test_mutated_manifests_give_the_same_content_or_a_format_error(seed: int, base: Callable[[], Document]) -> None:
    rng = random.Random(seed)
    accepted, own = 0, base()["digest"]
    for number in range(100):
        data = mutate_bytes(rng, dump(base()))
        changed = mutate_value(rng, base())
        for attempt, digest in (
            (data, own),
            (dump(changed), own),
            (dump(seal(changed)), seal(changed)["digest"]),
        ):
            try:
                parsed = parse_manifest(attempt)
            except FormatError:
                continue
            except Exception as error:
                raise AssertionError(f"seed {seed}, mutation {number}: {error!r} for {attempt!r}") from error
            accepted += attempt is data
            assert parsed.digest == digest, f"seed {seed}, mutation {number}: {attempt!r}"
            assert parse_manifest(parsed.dumps()) == parsed, f"seed {seed}, mutation {number}: {attempt!r}"
    assert accepted < 60, "the mutations hardly change anything"


# --- the file --------------------------------------------------------------------------------------------------------


def load_fails(folder: Path) -> str:
    """The FormatError of load_manifest, which must name the file; a call that waits for ever is a failure."""
    with must_not_block(), pytest.raises(FormatError) as caught:
        load_manifest(folder)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'manifest.json'}: "), message
    assert "expected" in message
    assert "found" in message
    return message


def test_errors_of_parsing_name_the_file(tmp_path: Path) -> None:
    for data in (b"", b"{", dump({**document(), "format_version": 1}), dump({**document(), "digest": ""})):
        (tmp_path / "manifest.json").write_bytes(data)
        load_fails(tmp_path)


def test_a_manifest_of_more_than_64_mib_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    assert load_fails(tmp_path).endswith(
        f"expected a manifest of at most {64 << 20:,} bytes, found {(64 << 20) + 1:,} bytes"
    )
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a TiB on paper
    load_fails(tmp_path)


def test_a_manifest_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.symlink_to("nothing")
    assert "found a symbolic link" in load_fails(tmp_path)
    path.unlink()
    os.mkfifo(path)
    assert "found a FIFO" in load_fails(tmp_path)


@pytest.mark.parametrize(
    ("folder", "word"),
    [("", "`shardio convert SRC OUT`"), ("begun", "resumes"), ("nowhere", "does not exist"), ("file", "not a folder")],
)
def test_without_a_manifest_the_way_out_is_named(tmp_path: Path, folder: str, word: str) -> None:
    (tmp_path / "begun" / ".convert").mkdir(parents=True)
    (tmp_path / "file").touch()
    with pytest.raises(SetNotFoundError, match=word) as caught:
        load_manifest(tmp_path / folder)
    assert str(caught.value).startswith(f"{tmp_path / folder / 'manifest.json'}: not found: ")
