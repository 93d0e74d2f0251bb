"""The readers in C, JavaScript and Rust agree with the conformance kit, and with shardio on sets with random damage.

Each reader answers a list of requests: folder, split, part and sample. It must answer all of them, whatever the files
hold: a crash, a hang or an unexpected exception leaves answers out.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from make_conformance import make_kit
from manifests import mutate_bytes, mutate_value, seal
from places import ROOT

from shardio.errors import FormatError
from shardio.format.manifest import parse_manifest
from shardio.reading.shardset import open_shards
from shardio.sets.verify import verify

READERS = ROOT / "readers"
NUM_MUTATIONS = 200


class Request(NamedTuple):
    folder: Path
    split: str
    part: str
    sample: int


class Kit(NamedTuple):
    folder: Path
    expected: dict[str, Any]

    def valid_requests(self) -> dict[Request, str]:
        """Every value of every valid set, and the answer: label, key and sha256."""
        answers = {}
        for name, case in self.expected["valid"].items():
            for split, samples in case["splits"].items():
                for number, sample in enumerate(samples):
                    label = "-" if sample["label"] is None else sample["label"]
                    for part, sums in sample["parts"].items():
                        request = Request(self.folder / "valid" / name, split, part, number)
                        answers[request] = f"ok {label} {sample['key']} {sums['sha256']}"
        return answers


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    folder = tmp_path_factory.mktemp("kit")
    return Kit(folder, make_kit(folder))


def built(*command: str | Path) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module", params=["c", "js", "rust"])
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that answers requests."""
    out = tmp_path_factory.mktemp("reader")
    if request.param == "js":
        built("node", "--version")
        return ["node", str(READERS / "js" / "read.mjs")]
    if request.param == "rust":
        built("cargo", "--version")
        manifest = READERS / "rust" / "Cargo.toml"
        built("cargo", "build", "--offline", "--locked", "--quiet", "--manifest-path", manifest, "--target-dir", out)
        return [str(out / "debug" / "read")]
    sanitizers = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    built("gcc", *sanitizers, "-o", out / "read", READERS / "c" / "read.c", "-lm")
    return [str(out / "read")]


def answers(reader: list[str], requests: list[Request]) -> list[str]:
    text = "".join("\t".join(map(str, request)) + "\n" for request in requests)
    environ = os.environ | {"ASAN_OPTIONS": "allocator_may_return_null=1"}
    result = subprocess.run(
        reader, input=text, capture_output=True, text=True, timeout=120, check=False, env=environ, cwd=READERS
    )
    found = result.stdout.splitlines()
    assert (result.returncode, len(found)) == (0, len(requests)), (
        f"{requests[len(found) :][:1]}: {result.stderr[-3000:]}"
    )
    assert all(answer.startswith(("ok ", "refused ")) for answer in found)
    return found


def test_a_reader_finds_the_samples_of_valid_sets(reader: list[str], kit: Kit) -> None:
    expected = kit.valid_requests()
    assert dict(zip(expected, answers(reader, [*expected]), strict=True)) == expected


def test_a_reader_refuses_what_the_kit_says(reader: list[str], kit: Kit) -> None:
    cases = kit.expected["refused"]
    requests = [
        Request(kit.folder / "refused" / name, case["split"], case["part"], case["sample"])
        for name, case in cases.items()
    ]
    found = dict(zip(cases, answers(reader, requests), strict=True))
    assert [name for name, answer in found.items() if not answer.startswith("refused ")] == []


def test_a_reader_refuses_what_a_set_does_not_have(reader: list[str], kit: Kit) -> None:
    folder = kit.folder / "valid" / "arrays"
    requests = [Request(folder, *rest) for rest in (("train", "pixels", 3), ("val", "pixels", 0), ("train", "x", 0))]
    requests += [Request(folder, "train", "pixels", 2**63), Request(folder / "missing", "train", "pixels", 0)]
    assert all(answer.startswith("refused ") for answer in answers(reader, requests))


def test_a_reader_refuses_a_manifest_above_the_largest_size(reader: list[str], kit: Kit, tmp_path: Path) -> None:
    shutil.copytree(kit.folder / "valid" / "pixels", tmp_path / "set")
    with (tmp_path / "set" / "manifest.json").open("ab") as file:
        file.write(b" " * (64 << 20))
    (answer,) = answers(reader, [Request(tmp_path / "set", "train", "pixels", 0)])
    assert answer.startswith("refused ")


def mutated(rng: random.Random, kit: Kit, folder: Path) -> Request:
    """Makes a damaged copy of a valid set, and returns a request for one of its values."""
    source, split, part, sample = rng.choice([*kit.valid_requests()])
    shutil.copytree(source, folder)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_bytes())
    kind = rng.randrange(3)
    if kind == 0:
        path.write_bytes(mutate_bytes(rng, path.read_bytes()))
    elif kind == 1:
        path.write_text(json.dumps(seal(mutate_value(rng, manifest))))
    else:
        path = rng.choice(sorted(folder.glob("*.npy")))
        old = path.read_bytes()
        new = mutate_bytes(rng, old)
        path.write_bytes(new)
        if rng.random() < 0.7:  # as an attacker would
            text = json.dumps(manifest).replace(hashlib.sha256(old).hexdigest(), hashlib.sha256(new).hexdigest())
            (folder / "manifest.json").write_text(json.dumps(seal(json.loads(text))))
    return Request(folder, split, part, sample)


def shardio_refuses_the_manifest(folder: Path) -> bool:
    try:
        parse_manifest((folder / "manifest.json").read_bytes())
    except FormatError:
        return True
    return False


def sha256_in_shardio(request: Request) -> str:
    shards = open_shards(request.folder, request.split)
    if request.part == "pixels":
        return hashlib.sha256(shards.image_of(request.sample)).hexdigest()
    return hashlib.sha256(shards.values_of(request.part, np.array([request.sample]))).hexdigest()


def test_a_reader_survives_random_damage_and_agrees_with_shardio(reader: list[str], kit: Kit, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    requests = [mutated(rng, kit, tmp_path / str(number)) for number in range(NUM_MUTATIONS)]
    for request, answer in zip(requests, answers(reader, requests), strict=True):
        if shardio_refuses_the_manifest(request.folder):
            assert answer.startswith("refused "), f"seed {seed}: {request}: {answer}"
        elif verify(request.folder).ok and answer.startswith("ok "):
            assert answer.endswith(sha256_in_shardio(request)), f"seed {seed}: {request}: {answer}"
