"""The conformance kit has its golden bytes; shardio reads the valid sets and refuses the others; the JSON Schema, too,
as far as a schema can see."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from make_conformance import dumps, make_kit
from places import DATA, ROOT

from shardio.errors import FormatError, ShardioError
from shardio.loading.loader import ShardLoader
from shardio.reading.shardset import ShardSet, open_shards
from shardio.sets.verify import verify

EXPECTED: dict[str, Any] = json.loads((ROOT / "conformance" / "expected.json").read_bytes())
VALID, REFUSED = EXPECTED["valid"], EXPECTED["refused"]


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kit")
    (folder / "expected.json").write_text(dumps(make_kit(folder)), encoding="ascii")
    return folder


def test_the_kit_has_its_golden_bytes(kit: Path) -> None:
    assert (kit / "expected.json").read_bytes() == (ROOT / "conformance" / "expected.json").read_bytes()


def test_the_kit_has_a_folder_for_each_verdict(kit: Path) -> None:
    for verdict, sets in (("valid", VALID), ("refused", REFUSED)):
        assert {path.name for path in (kit / verdict).iterdir()} == set(sets)


def value_of(shards: ShardSet, part: str, sample: int) -> bytes:
    if part == "pixels":
        return shards.image_of(sample).tobytes()
    return shards.values_of(part, np.array([sample])).tobytes()


@pytest.mark.parametrize("name", VALID)
def test_valid_sets_are_read(kit: Path, name: str) -> None:
    folder = kit / "valid" / name
    assert verify(folder).ok
    for split, samples in VALID[name]["splits"].items():
        shards = open_shards(folder, split, digest=VALID[name]["digest"])
        assert len(shards) == len(samples)
        for number, expected in enumerate(samples):
            sample = np.array([number])
            if expected["label"] is not None:
                assert shards.labels_of(sample).tolist() == [expected["label"]]
            assert [key.hex() for key in shards.column_of("key", sample).tolist()] == [expected["key"]]
            for column, number_in_column in expected["columns"].items():
                (found,) = shards.column_of(column, sample).tolist()
                assert found == number_in_column or (np.isnan(found) and number_in_column is None)
            for part, sums in expected["parts"].items():
                value = value_of(shards, part, number)
                assert hashlib.sha256(value).hexdigest() == sums["sha256"]
                assert crc32(value) == sums["crc32"]


def read_checked(folder: Path, split: str, part: str) -> None:
    options: dict[str, Any] = {} if part == "pixels" else {"images": None, "arrays": [part]}
    with ShardLoader(folder, 1, split=split, shuffle=False, check="sample", device="cpu", **options) as loader:
        next(iter(loader))


@pytest.mark.parametrize("name", REFUSED)
def test_other_sets_are_refused(kit: Path, name: str) -> None:
    folder, case = kit / "refused" / name, REFUSED[name]
    if case["when"] == "verify":
        assert not verify(folder).ok
        return
    with pytest.raises(ShardioError):
        read_checked(folder, case["split"], case["part"])
    if case["when"] == "open" and case["part"] == "pixels":  # files of arrays are opened when the array is first used
        with pytest.raises(ShardioError):
            open_shards(folder, case["split"])


def test_a_manifest_above_the_largest_size_is_refused(kit: Path, tmp_path: Path) -> None:
    shutil.copytree(kit / "valid" / "pixels", tmp_path / "set")
    with (tmp_path / "set" / "manifest.json").open("ab") as file:
        file.write(b" " * (64 << 20))
    with pytest.raises(FormatError, match="at most"):
        open_shards(tmp_path / "set")


# --- the JSON Schema --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def schema() -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    document = json.loads((ROOT / "docs" / "manifest.schema.json").read_bytes())
    jsonschema.Draft202012Validator.check_schema(document)
    return jsonschema.Draft202012Validator(document)


def test_the_schema_accepts_valid_manifests(kit: Path, schema: Any) -> None:
    golden = [*DATA.glob("golden*/manifest.json"), *kit.glob("valid/*/manifest.json")]
    assert len(golden) > len(VALID)
    for path in golden:
        assert [error.message for error in schema.iter_errors(json.loads(path.read_bytes()))] == [], path


@pytest.mark.parametrize("name", [name for name, case in REFUSED.items() if case["schema"]])
def test_the_schema_refuses_what_a_schema_can_see(kit: Path, schema: Any, name: str) -> None:
    assert not schema.is_valid(json.loads((kit / "refused" / name / "manifest.json").read_bytes()))


@pytest.mark.parametrize("name", [name for name, case in REFUSED.items() if not case["schema"]])
def test_the_kit_says_what_a_schema_cannot_see(kit: Path, schema: Any, name: str) -> None:
    try:
        document = json.loads((kit / "refused" / name / "manifest.json").read_bytes())
    except (ValueError, OSError, RecursionError):
        return  # no JSON: there is nothing that a schema could look at
    assert schema.is_valid(document)
