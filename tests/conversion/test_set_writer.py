"""ShardWriter: a set has the samples and arrays that were given, or a clear error comes and nothing is left."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from disks import FailingDisk, every_failure
from folders import contents, put
from numpy.typing import NDArray
from pictures import sample_pixels
from PIL import Image

from shardio.conversion.writing.set_writer import ShardWriter
from shardio.errors import ConvertError
from shardio.format.manifest_file import load_manifest
from shardio.reading.shardset import open_shards
from shardio.sets.verify import verify
from shardio.system.files import _machine

SHAPE = (6, 5, 3)
NBYTES = 90
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


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# --- what is written --------------------------------------------------------------------------------------------------


def test_samples_and_arrays_are_read_as_they_were_given_in_every_split(tmp_path: Path) -> None:
    splits = ("train", "val", "test-v2")
    with ShardWriter(tmp_path / "set", SHAPE, arrays=DECLARED, shard_nbytes=4096 + 4 * NBYTES) as writer:
        for i in range(14):
            pixels, given = sample_pixels(i), values(i)
            writer.append(pixels, i, split=splits[min(i % 4, 2)], key=f"k{i}", **given)
            pixels[:], given["mask"][:] = 0, 0  # what was given is a copy by then
    assert verify(tmp_path / "set").ok
    for split in splits:
        numbers = [i for i in range(14) if splits[min(i % 4, 2)] == split]
        shards = open_shards(tmp_path / "set", split)
        kinds = {name: array.kind for name, array in shards.manifest.splits[split].arrays.items()}
        assert kinds == {name: kind for name, (kind, *_) in DECLARED.items()}
        assert shards.index["key"].tolist() == [b"k%d" % i for i in numbers]
        for i, sample in zip(numbers, shards, strict=True):
            assert sample.label == i
            assert np.array_equal(sample.image, sample_pixels(i))
            for name, value in values(i).items():
                assert np.array_equal(sample.arrays[name], value), (split, i, name)


def test_values_may_be_anything_that_numpy_takes(tmp_path: Path) -> None:
    declared: dict[str, Any] = {"mask": ("mask", "bool", (6, 5)), "vector": ("array", np.float32, (2,))}
    with ShardWriter(tmp_path / "set", SHAPE, arrays=declared) as writer:
        mask = np.asfortranarray(np.eye(6, 5, dtype=bool))
        writer.append(sample_pixels(0), 0, mask=mask, vector=torch.tensor([1.0, 2.0]))
        with pytest.raises(ValueError, match="array 'mask': expected bytes of 0 or 1 for bool, found 255"):
            writer.append(
                sample_pixels(0), 0, mask=np.full((6, 5), 255, np.uint8).view(bool), vector=torch.tensor([1.0, 2.0])
            )
    (sample,) = open_shards(tmp_path / "set")
    assert np.array_equal(sample.arrays["mask"], mask)
    assert sample.arrays["vector"].tolist() == [1, 2]


@pytest.mark.parametrize("samples_per_shard", [1, 2, 5])
def test_shards_are_cut_when_they_are_full(tmp_path: Path, samples_per_shard: int) -> None:
    for num_samples in (1, 2, 5, 6):
        for spare in (0, NBYTES - 1, *((-1, -4096) if samples_per_shard == 1 else ())):  # at least one
            out = tmp_path / f"{num_samples}-{spare}"
            with ShardWriter(out, SHAPE, shard_nbytes=4096 + samples_per_shard * NBYTES + spare) as writer:
                for i in range(num_samples):
                    writer.append(sample_pixels(i), 0)
            counts = [shard.num_samples for shard in load_manifest(out).splits["train"].shards]
            whole, rest = divmod(num_samples, samples_per_shard)
            assert counts == [samples_per_shard] * whole + [rest] * (rest > 0)


def test_default_keys_are_the_numbers_in_the_split(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with ShardWriter(out, SHAPE, shard_nbytes=4096 + 2 * NBYTES) as writer:
        for i in range(11):
            writer.append(sample_pixels(i), 0, split="val" if i % 3 == 0 else "train")
        writer.append(sample_pixels(0), 0, key="own")
        writer.append(sample_pixels(0), 0)
    assert open_shards(out).index["key"].tolist() == [*(b"%d" % i for i in range(7)), b"own", b"8"]
    assert open_shards(out, "val").index["key"].tolist() == [b"%d" % i for i in range(4)]
    assert set(open_shards(out).index["source_height"]) == {SHAPE[0]}
    assert set(open_shards(out).index["source_width"]) == {SHAPE[1]}


@pytest.mark.parametrize("length", [188, 190, 200])
def test_what_is_published_under_a_long_split_name_can_be_opened(tmp_path: Path, length: int) -> None:
    """File names have room for 200 characters, and they are longer than the split's."""
    try:
        with ShardWriter(tmp_path / "out", SHAPE) as writer:
            writer.append(sample_pixels(0), 0, split="s" * length)
    except ValueError:
        assert length > 188
    else:
        assert len(open_shards(tmp_path / "out", "s" * length)) == 1


def test_the_longest_keys_the_largest_numbers_and_any_bytes_are_taken(tmp_path: Path) -> None:
    keys: list[bytes | str] = [b"\xff\xfe", b"a\0b", b" ", b"x" * 65532, "\u00fc/\U0001f600"]
    labels = [0, -1, (1 << 63) - 1, -(1 << 63), 7]
    with ShardWriter(tmp_path / "out", SHAPE) as writer:
        for key, label in zip(keys, labels, strict=True):
            writer.append(sample_pixels(0), label, key=key, source_size=((1 << 32) - 1, 1))
    shards = open_shards(tmp_path / "out")
    assert shards.index["key"].tolist() == [key.encode() if isinstance(key, str) else key for key in keys]
    assert shards.labels.tolist() == labels
    assert set(shards.index["source_height"]) == {(1 << 32) - 1}
    assert shards.classes == ()


# --- what is refused --------------------------------------------------------------------------------------------------

ABSENT = object()


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        *(
            ({"image": pixels}, ValueError, f"uint8 pixels .*found {pixels.dtype}")
            for pixels in (
                np.zeros((6, 5), np.uint8),
                np.zeros((6, 5, 1), np.uint8),
                np.zeros((1, 6, 5, 3), np.uint8),
                np.zeros(SHAPE, np.int8),
                np.zeros(SHAPE, bool),
            )
        ),
        *(
            ({"image": image}, TypeError, f"image must be .*{kind}")
            for image, kind in (([[0]], "list"), (None, "None"))
        ),
        ({"image": Image.new("RGB", (5, 6))}, TypeError, "image must be a NumPy array.*found Image"),
        *(({"label": label}, TypeError, "label must be an integer") for label in (0.5, 1.0, "1", None, np.float32(1))),
        *(({"label": label}, ValueError, f"label .*{label}$") for label in (1 << 63, -(1 << 63) - 1)),
        *(({"key": key}, ValueError, "key must not end in a NUL byte") for key in (b"a\0", "a\0", b"\0")),
        *(({"key": key}, TypeError, "key must be str or bytes") for key in (5, None, bytearray(b"x"))),
        *(({"key": b"x" * n}, ValueError, f"key .*found {n}") for n in (65_533, 65_537, 1_000_000)),
        *(({"source_size": (5, n)}, ValueError, f"source_size .*{n}") for n in (-1, 1 << 32)),
        *(({"source_size": (n, 5)}, ValueError, f"source_size .*{n}") for n in (-1, 1 << 32, 7.5)),
        *(({"source_size": size}, ValueError, "source_size must be") for size in (5, (5,), "56")),
        *(({"split": split}, ValueError, "split must match") for split in ("", "../x", "a/b", ".hidden", "x" * 201)),
        ({"mask": np.zeros((5, 6), np.uint8)}, ValueError, r"array 'mask': expected shape \(6, 5\), found \(5, 6\)"),
        ({"mask": np.zeros((6, 5), np.int64)}, TypeError, "array 'mask': expected uint8, found int64"),
        ({"clip": [[1.0], [1.0, 2.0]]}, TypeError, "array 'clip': expected float16, found no array"),
        ({"clip": None}, TypeError, "array 'clip': expected float16, found object"),
        ({"clip": ABSENT}, TypeError, "found mask, depth, small, score$"),
        ({"other": np.zeros(3)}, TypeError, r"arrays of the set \(mask, depth, small, clip, score\), found .*other"),
    ],
)
def test_a_refused_sample_adds_nothing_to_the_set(
    tmp_path: Path, changed: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with ShardWriter(tmp_path / "out", SHAPE, arrays=DECLARED) as writer:
        for i in range(2):
            given = {"image": sample_pixels(9), "label": 9, **values(9), **changed}
            with pytest.raises(kind, match=words) as caught:
                writer.append(**{name: value for name, value in given.items() if value is not ABSENT})
            assert len(str(caught.value)) < 1000
            writer.append(sample_pixels(i), i, **values(i))
    assert {name.partition("-")[0] for name in names(tmp_path / "out")} == {"manifest.json", "train"}
    assert open_shards(tmp_path / "out").labels.tolist() == [0, 1]
    assert verify(tmp_path / "out").ok


def arrays(name: str, *declaration: Any) -> dict[str, Any]:
    return {"arrays": {name: declaration}}


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"sample_shape": (0, 5, 3)}, ValueError, r"must be \(height, width, channels\).*found \(0, 5, 3\)"),
        ({"classes": ["cat", "dog", "cat"]}, ValueError, "distinct"),
        ({"classes": "cat"}, TypeError, "lists of names, found 'cat'"),
        ({"classes": ["c"], "class_names": "C"}, TypeError, "lists of names.*'C'"),
        *(
            ({"classes": ["a", "b"], which: wrong}, kind, f"{which} must .*, found .*{found}")
            for which in ("classes", "class_names")
            for wrong, kind, found in (
                ([0, 1], TypeError, "0"),
                ([b"a", b"b"], TypeError, "b'a'"),
                (["a", "\ud800"], ValueError, "ud800"),
            )
        ),
        (arrays("split", "array", "f4", ()), ValueError, "array 'split': expected another name"),
        (arrays("pixels", "array", "f4", ()), ValueError, "an array's name must not be one of crc32, image"),
        (arrays("a-b", "array", "f4", ()), ValueError, "name must be"),
        (arrays("a", "array", "f4"), TypeError, r"array 'a': expected \(kind, dtype, shape\)"),
        (arrays("a", "array", "f4", 7), TypeError, r"array 'a': expected \(kind, dtype, shape\)"),
        (arrays("a", "array", "complex64", ()), ValueError, "array 'a': an array's dtype must be one of"),
        (arrays("a", "array", "nothing", ()), TypeError, "array 'a': .*nothing"),
        (arrays("a", "mask", "u1", (5, 6)), ValueError, "array 'a': a mask must have the samples' height and width"),
        (arrays("a", "picture", "u1", (6, 5)), ValueError, "array 'a': an array's kind must be one of"),
        ({"arrays": {f"a{i}": ("array", "u1", ()) for i in range(51)}}, ValueError, "at most 50"),
        ({"arrays": dict.fromkeys("aA", ("array", "u1", ()))}, ValueError, "differ in more than case"),
        ({"labels": "float32", **arrays("Labels", "array", "u1", ())}, ValueError, "differ in more than case"),
    ],
)
def test_what_no_set_can_have_is_refused_before_anything_is_written(
    tmp_path: Path, arguments: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        ShardWriter(tmp_path / "out", **{"sample_shape": SHAPE, **arguments})
    assert not (tmp_path / "out").exists()


def test_labels_must_be_classes(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "out", SHAPE, classes=["cat", "dog"]) as writer:
        for label in (0, 1, np.int64(1), np.uint8(0)):
            writer.append(sample_pixels(0), label)  # type: ignore[arg-type]
        for label in (-1, 2, 1 << 63, -(1 << 63) - 1):
            with pytest.raises(ValueError, match=rf"label must be from 0 to 1, found {label}$"):
                writer.append(sample_pixels(0), label)
    assert open_shards(tmp_path / "out").labels.tolist() == [0, 1, 1, 0]


def test_a_squashed_picture_had_a_size(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set", SHAPE, squashed=True) as writer:
        with pytest.raises(ValueError, match="source_size"):
            writer.append(sample_pixels(0), 0, source_size=(0, 7))
        writer.append(sample_pixels(0), 0)
    assert open_shards(tmp_path / "set").content.squashed


@pytest.mark.parametrize("splits", [("train", "train-val"), ("Train-Val", "train")])
def test_an_array_whose_files_would_be_called_like_another_splits_shards_is_refused(
    tmp_path: Path, splits: tuple[str, str]
) -> None:
    with ShardWriter(tmp_path / "set", SHAPE, arrays={"val": ("array", "u1", ())}) as writer:
        writer.append(sample_pixels(0), 0, split=splits[0], val=np.uint8(0))
        with pytest.raises(ValueError, match="array 'val': expected another name, as its files for the split"):
            writer.append(sample_pixels(0), 0, split=splits[1], val=np.uint8(0))
    assert verify(tmp_path / "set").ok


def test_splits_whose_names_differ_only_in_case_are_refused_before_any_sample_is_lost(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set", SHAPE) as writer:
        writer.append(sample_pixels(0), 0)
        with pytest.raises(ValueError, match="more than case; found 'train' and 'Train'"):
            writer.append(sample_pixels(0), 0, split="Train")
    assert verify(tmp_path / "set").ok


def test_no_samples_are_no_set(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="out: expected at least one sample"), ShardWriter(tmp_path / "out", SHAPE):
        pass
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["manifest.json", "train-00000.npy", ".hidden", "notes.txt", "folder/"])
def test_a_folder_with_anything_in_it_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    put(tmp_path, name)
    with pytest.raises(ConvertError, match=rf"found '{name.rstrip('/')}' in it.*write to a new folder") as caught:
        ShardWriter(tmp_path, SHAPE)
    assert str(caught.value).startswith(f"{tmp_path}: ")
    assert names(tmp_path) == [name.rstrip("/")]


# --- errors and kills -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_samples", "error", "there"),
    [(0, ValueError("x"), False), (1, KeyboardInterrupt(), True), (4, ValueError("x"), True), (5, OSError(), False)],
)
def test_an_exception_publishes_nothing_and_leaves_what_was_there(
    tmp_path: Path, num_samples: int, error: BaseException, there: bool
) -> None:
    out = tmp_path / "out"
    if there:
        out.mkdir()

    def fail_halfway() -> None:
        with ShardWriter(out, SHAPE, arrays=DECLARED, shard_nbytes=4096 + 2 * NBYTES) as writer:
            for i in range(num_samples):
                for split in ("train", "val"):
                    writer.append(sample_pixels(i), 0, split=split, **values(i))
            raise error

    with pytest.raises(type(error)):
        fail_halfway()
    assert names(tmp_path) == (["out"] if there else [])
    assert not list(tmp_path.glob("out/*"))
    write_small_set(out)  # the folder can be used again
    assert verify(out).ok


def test_a_set_has_one_writer_and_no_sample_after_the_block(tmp_path: Path) -> None:
    for i, error in enumerate((None, KeyError())):
        with contextlib.suppress(KeyError), ShardWriter(tmp_path / str(i), SHAPE) as writer:
            with pytest.raises(ConvertError, match="one writer"):
                ShardWriter(tmp_path / str(i), SHAPE)
            writer.append(sample_pixels(0), 0, key=os.fsdecode(b"\xff"))
            if error is not None:
                raise error
        for call in (writer.__enter__, lambda writer=writer: writer.append(sample_pixels(1), 1)):
            with pytest.raises(ValueError, match="after the end of the `with` block"):
                call()
    assert names(tmp_path) == ["0"]
    assert names(tmp_path / "0") == ["manifest.json", "train-00000.npy", "train-index.npy"]
    assert open_shards(tmp_path / "0").index["key"].tolist() == [b"\xff"]


def write_small_set(out: Path) -> None:
    given: dict[str, Any] = {"classes": ["a", "b"], "arrays": {"mask": DECLARED["mask"]}}
    with ShardWriter(out, SHAPE, **given, shard_nbytes=4096 + 2 * NBYTES) as writer:
        for i in range(3):
            writer.append(sample_pixels(i), i % 2, mask=values(i)["mask"])
        writer.append(sample_pixels(3), 0, split="val", mask=values(3)["mask"])


def test_a_set_is_published_or_the_folder_is_empty_whatever_call_fails(tmp_path: Path) -> None:
    numbers = iter(range(10_000))
    left: list[str] = []

    def do(disk: FailingDisk) -> bool:
        out = tmp_path / str(next(numbers))
        out.mkdir()
        error = None
        with disk.installed():
            try:
                write_small_set(out)
            except OSError as caught:
                error = caught
        assert error is None or error.errno == disk.code, disk
        if (out / "manifest.json").exists():
            assert verify(out).ok, disk
            assert len(open_shards(out)) == 3
        elif names(out):
            left.append(f"{disk}: {names(out)}")
        return error is None

    # Three shards, two files of the array and two of its checksums, two indexes and the manifest, each with six calls
    # at the least.
    assert every_failure(do) >= 4 * 10 * 6
    assert not left, left


def test_what_a_killed_writer_left_is_no_obstacle_and_changes_no_byte(tmp_path: Path) -> None:
    put(tmp_path / "one", f".train-00000.npy.{_machine()}-0123456789abcdef.tmp", content=b"half")
    for name in ("one", "two"):
        write_small_set(tmp_path / name)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_the_folder_is_made_with_its_parents_and_a_file_in_its_place_is_named(tmp_path: Path) -> None:
    write_small_set(tmp_path / "a" / "b" / "c")
    assert verify(tmp_path / "a" / "b" / "c").ok
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(FileExistsError, match="file"):
        ShardWriter(tmp_path / "file", SHAPE)
    assert (tmp_path / "file").read_bytes() == b"x"
