"""ShardWriter writes arrays beside the pixels: the values that were given, or a clear error and nothing at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pictures import sample_pixels

from shardio.conversion.writing.set_writer import ShardWriter
from shardio.errors import ConvertError
from shardio.reading.shardset import open_shards
from shardio.sets.verify import verify

SHAPE = (6, 5, 3)
DECLARED: dict[str, Any] = {
    "mask": ("mask", np.uint8, (6, 5)),
    "depth": ("mask", ">u2", (6, 5, 2)),
    "small": ("array", "uint8", (3, 2, 3)),
    "clip": ("array", "float16", (7,)),
    "score": ("array", float, ()),
}


def values(i: int) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(i)
    return {
        "mask": rng.integers(0, 256, (6, 5), dtype=np.uint8),
        "depth": rng.integers(0, 1 << 16, (6, 5, 2), dtype=np.uint16),
        "small": rng.integers(0, 256, (3, 2, 3), dtype=np.uint8),
        "clip": rng.standard_normal(7).astype(np.float16),
        "score": np.float64(rng.standard_normal()),
    }


def test_arrays_are_read_as_they_were_given_in_every_split(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set", SHAPE, arrays=DECLARED, shard_nbytes=4096 + 4 * 90) as writer:
        for i in range(11):
            given = values(i)
            writer.append(sample_pixels(i), i, split="val" if i % 3 == 0 else "train", **given)
            given["mask"][:] = 0  # what was given is a copy by then
    assert verify(tmp_path / "set").ok
    for split, numbers in (("train", [1, 2, 4, 5, 7, 8, 10]), ("val", [0, 3, 6, 9])):
        shards = open_shards(tmp_path / "set", split)
        kinds = {name: array.kind for name, array in shards.manifest.splits[split].arrays.items()}
        assert kinds == {name: kind for name, (kind, *_) in DECLARED.items()}
        for position, i in enumerate(numbers):
            sample = shards[position]
            assert np.array_equal(sample.image, sample_pixels(i))
            for name, value in values(i).items():
                assert np.array_equal(sample.arrays[name], value), (split, i, name)


def test_values_may_be_anything_that_numpy_takes(tmp_path: Path) -> None:
    declared: dict[str, Any] = {"mask": ("mask", "bool", (6, 5)), "vector": ("array", np.float32, (2,))}
    with ShardWriter(tmp_path / "set", SHAPE, arrays=declared) as writer:
        mask = np.asfortranarray(np.eye(6, 5, dtype=bool))
        writer.append(sample_pixels(0), 0, mask=mask, vector=torch.tensor([1.0, 2.0]))
    sample = open_shards(tmp_path / "set")[0]
    assert np.array_equal(sample.arrays["mask"], mask)
    assert sample.arrays["vector"].tolist() == [1, 2]
    with (
        pytest.raises(ValueError, match="array 'mask': expected bytes of 0 or 1 for bool, found 255"),
        ShardWriter(tmp_path / "other", SHAPE, arrays=declared) as writer,
    ):
        writer.append(sample_pixels(0), 0, mask=np.full((6, 5), 255, np.uint8).view(bool), vector=[1.0, 2.0])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"mask": np.zeros((5, 6), np.uint8)}, ValueError, r"array 'mask': expected shape \(6, 5\), found \(5, 6\)"),
        ({"mask": np.zeros((6, 5), np.int64)}, TypeError, "array 'mask': expected uint8, found int64"),
        ({"clip": [[1.0], [1.0, 2.0]]}, TypeError, "array 'clip': expected float16, found no array"),
        ({"clip": None}, TypeError, "array 'clip': expected float16, found object"),
        (
            {"other": np.zeros(3)},
            TypeError,
            r"arrays of the set \(mask, depth, small, clip, score\), found .*other",
        ),
    ],
)
def test_wrong_values_add_nothing_and_their_array_is_named(
    tmp_path: Path, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    with ShardWriter(tmp_path / "set", SHAPE, arrays=DECLARED) as writer:
        writer.append(sample_pixels(0), 0, **values(0))
        with pytest.raises(error, match=message):
            writer.append(sample_pixels(1), 0, **{**values(1), **changed})
        with pytest.raises(TypeError, match=r"found mask$"):
            writer.append(sample_pixels(1), 0, mask=values(1)["mask"])
        writer.append(sample_pixels(1), 0, **values(1))
    assert len(open_shards(tmp_path / "set")) == 2
    assert verify(tmp_path / "set").ok


def test_a_squashed_picture_had_a_size(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set", SHAPE, squashed=True) as writer:
        with pytest.raises(ValueError, match="source_size"):
            writer.append(sample_pixels(0), 0, source_size=(0, 7))
        writer.append(sample_pixels(0), 0)
    assert open_shards(tmp_path / "set").content.squashed


@pytest.mark.parametrize(
    ("declared", "error", "message"),
    [
        ({"split": ("array", "f4", ())}, ValueError, "array 'split': expected another name"),
        (
            {"pixels": ("array", "f4", ())},
            ValueError,
            "an array's name must not be one of crc32, image",
        ),
        ({"a-b": ("array", "f4", ())}, ValueError, "name must be"),
        ({"a": ("array", "f4")}, TypeError, r"array 'a': expected \(kind, dtype, shape\)"),
        ({"a": ("array", "f4", 7)}, TypeError, r"array 'a': expected \(kind, dtype, shape\)"),
        ({"a": ("array", "complex64", ())}, ValueError, "array 'a': an array's dtype must be one of"),
        ({"a": ("array", "nothing", ())}, TypeError, "array 'a': .*nothing"),
        ({"a": ("mask", "u1", (5, 6))}, ValueError, "array 'a': a mask must have the samples' height and width"),
        ({"a": ("picture", "u1", (6, 5))}, ValueError, "array 'a': an array's kind must be one of"),
        ({f"a{i}": ("array", "u1", ()) for i in range(51)}, ValueError, "at most 50"),
    ],
)
def test_what_no_set_can_have_is_refused_when_it_is_declared(
    tmp_path: Path, declared: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ShardWriter(tmp_path / "set", SHAPE, arrays=declared)
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("splits", [("train", "train-val"), ("Train-Val", "train")])
def test_an_array_whose_files_would_be_called_like_another_splits_shards_is_refused(
    tmp_path: Path, splits: tuple[str, str]
) -> None:
    with ShardWriter(tmp_path / "set", SHAPE, arrays={"val": ("array", "u1", ())}) as writer:
        writer.append(sample_pixels(0), 0, split=splits[0], val=np.uint8(0))
        with pytest.raises(ValueError, match="array 'val': expected another name, as its files for the split"):
            writer.append(sample_pixels(0), 0, split=splits[1], val=np.uint8(0))
    assert verify(tmp_path / "set").ok


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="mine"):  # noqa: PT012, SIM117
        with ShardWriter(tmp_path / "set", SHAPE, arrays=DECLARED, shard_nbytes=4096 + 4 * 90) as writer:
            for i in range(7):
                writer.append(sample_pixels(i), i, **values(i))
            raise RuntimeError("mine")
    assert not (tmp_path / "set").exists()


def test_a_failed_publication_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise ConvertError("no")

    monkeypatch.setattr("shardio.conversion.writing.set_writer.commit_manifest", fail)
    with pytest.raises(ConvertError, match="no"):  # noqa: SIM117
        with ShardWriter(tmp_path / "set", SHAPE, arrays=DECLARED) as writer:
            writer.append(sample_pixels(0), 0, **values(0))
    assert not (tmp_path / "set").exists()
