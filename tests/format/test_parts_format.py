"""Which parts a sample has: pixels or none; labels that are integers, numbers, vectors, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import as_batch, sample_pixels

from shardio import ShardDataset, ShardLoader
from shardio.augment import CenterCrop, Compose, CutMix, Mixup, Normalize
from shardio.cache.stage import stage
from shardio.changes.change import change
from shardio.changes.merge import merge
from shardio.conversion.writing.set_writer import LabelType, ShardWriter
from shardio.errors import ConvertError, ShardioError
from shardio.format.manifest_file import load_manifest
from shardio.reading.shardset import open_shards
from shardio.sets.selection import Selection
from shardio.sets.verify import verify

SHAPE = (6, 5, 3)
COUNT = 23
LABELS: dict[str, tuple[LabelType, Callable[[int], Any]]] = {
    "int64": ("int64", lambda i: i % 4),
    "float32": ("float32", lambda i: i / 4),
    "vector": (("float32", 3), lambda i: [i % 2, i / 8, 1.0]),
    "none": (None, lambda i: None),
}


def latent_of(sample: int) -> np.ndarray[Any, np.dtype[np.float16]]:
    return np.full((2, 3), sample, np.float16)


def write(out: Path, labels: str = "int64", *, pixels: bool = True, first: int = 0, split: str = "train") -> Path:
    kind, label_of = LABELS[labels]
    arrays = {"latent": ("array", "float16", (2, 3))}
    shape = SHAPE if pixels else None
    with ShardWriter(out, shape, labels=kind, arrays=arrays, shard_nbytes=4096 + 8 * 90) as writer:  # type: ignore[arg-type]
        for i in range(first, first + COUNT):
            image = sample_pixels(i) if pixels else None
            writer.append(image, label_of(i), key=f"{i:03}", split=split, latent=latent_of(i))
    return out


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "pixels", "io"),
    [
        *((labels, pixels, "mmap") for labels in LABELS for pixels in (True, False)),
        *(("vector", True, "pread"), ("vector", False, "direct")),
    ],
)
def test_a_batch_is_a_tuple_of_the_parts_that_exist(tmp_path: Path, labels: str, pixels: bool, io: Any) -> None:
    out, label_of = write(tmp_path / "out", labels, pixels=pixels), LABELS[labels][1]
    options: dict[str, Any] = {"io": io, "device": "cpu", "seed": 7, "tail": "short", "check": "sample"}
    with ShardLoader(out, 4, return_indices=True, arrays=["latent"], **options) as loader:
        for batch in loader:
            assert isinstance(batch, tuple)
            *parts, indices, more = batch
            expected = []
            if pixels:
                expected.append(as_batch(np.stack([sample_pixels(i) for i in indices.tolist()])))
            if labels != "none":
                dtype = torch.int64 if labels == "int64" else torch.float32
                expected.append(torch.tensor([label_of(i) for i in indices.tolist()], dtype=dtype))
            assert_equal_parts(parts, expected)
            assert more.keys() == {"latent"}
            assert torch.equal(more["latent"][:, 0, 0], indices.half())
    samples = ShardDataset(out, arrays=["latent"])
    with ShardLoader(out, 4, **options) as loader:
        kinds = [torch.Tensor] * (pixels + (labels != "none")) + [dict] * (not pixels)
        assert all([type(part) for part in batch] == kinds for batch in loader)
        assert [type(part) for part in loader.dataset[3]] == [type(part) for part in samples[3]][: len(kinds)]
    assert [type(part) for part in samples[3]] == [
        *([torch.Tensor] if pixels else []),
        *({"int64": [int], "float32": [float], "vector": [torch.Tensor], "none": []}[labels]),
        dict,
    ]
    assert verify(out).ok
    assert verify(out, subset=0.5, seed=1).ok


def assert_equal_parts(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert [part.dtype for part in found] == [part.dtype for part in expected]
    assert all(map(torch.equal, found, expected))


def test_a_set_is_read_while_it_is_staged_and_after(tmp_path: Path) -> None:
    for labels, pixels in (("vector", True), ("float32", False)):
        out = write(tmp_path / f"out-{pixels}", labels, pixels=pixels)
        options: dict[str, Any] = {"device": "cpu", "tail": "short", "arrays": ["latent"], "return_indices": True}
        read = []
        for cache in (None, tmp_path / "cache", tmp_path / "cache"):
            with ShardLoader(out, 5, cache=cache, **options) as loader:
                read.append([part for batch in loader for part in batch if isinstance(part, torch.Tensor)])
            if len(read) == 2:
                stage(out, tmp_path / "cache")
        for found in read[1:]:
            assert_equal_parts(found, read[0])


@pytest.mark.parametrize(
    ("labels", "pixels", "options", "word"),
    [
        ("vector", True, {"arrays": ["labels"]}, "arrays"),
        ("none", False, {"arrays": ["latent"], "transform": CenterCrop(4)}, "transform"),
        ("none", True, {"transform": Compose([Normalize(0.0, 1.0), Mixup()])}, "labels"),
        ("int64", True, {"transform": CutMix()}, "num_classes"),
    ],
)
def test_a_loader_of_parts_that_do_not_exist_is_refused(
    tmp_path: Path, labels: str, pixels: bool, options: dict[str, Any], word: str
) -> None:
    out = write(tmp_path / "out", labels, pixels=pixels)
    with pytest.raises(ValueError, match=word):
        ShardLoader(out, 4, device="cpu", **options)


# --- mixing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("labels", "kind"), [("float32", Mixup), ("vector", CutMix)])
def test_labels_that_are_no_integers_are_mixed_as_they_are(tmp_path: Path, kind: Any, labels: str) -> None:
    """A black and a white picture: the share of a label is the share of its picture."""
    label = {"float32": (2.0, -6.0), "vector": ((1.0, 0.0), (0.0, 1.0))}[labels]
    row: LabelType = "float32" if labels == "float32" else ("float32", 2)
    with ShardWriter(tmp_path / "out", (16, 16, 1), labels=row) as writer:
        for value, one in zip((0, 255), label, strict=True):
            writer.append(np.full((16, 16, 1), value, np.uint8), one)
    transform = Compose([Normalize(0.0, 1.0), kind(per_sample=True)])
    low, high = torch.tensor(label)
    with ShardLoader(tmp_path / "out", 2, transform=transform, device="cpu") as loader:
        for _ in range(5):
            for images, mixed in loader:
                assert mixed.dtype == torch.float32
                white = images.mean(dim=(1, 2, 3)).view(-1, *[1] * (mixed.ndim - 1))
                torch.testing.assert_close(mixed, low + (high - low) * white, atol=1e-5, rtol=0)


def test_label_smoothing_is_of_class_numbers_alone() -> None:
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="label_smoothing"):
        CutMix(label_smoothing=0.1)(images, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="num_classes"):
        CutMix(4)(images, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="labels must be"):
        CutMix()(images, torch.zeros(2, 3, 3))


# --- writing and changing --------------------------------------------------------------------------------------------

WRONG_SAMPLES: dict[str, tuple[dict[str, Any], tuple[Any, ...], type[Exception], str]] = {
    "an image too many": ({"sample_shape": None}, (sample_pixels(0), 1), TypeError, "image"),
    "no image": ({}, (None, 1), TypeError, "image"),
    "no label": ({}, (sample_pixels(0),), TypeError, "label"),
    "a label too many": ({"labels": None}, (sample_pixels(0), 1), TypeError, "no labels"),
    "a vector that is too short": ({"labels": ("float32", 3)}, (sample_pixels(0), [1, 0]), ValueError, "labels"),
    "a number for a vector": ({"labels": ("float32", 3)}, (sample_pixels(0), 1.0), ValueError, "labels"),
    "a number beyond float32": ({"labels": "float32"}, (sample_pixels(0), 1e39), ValueError, "float32"),
    "text as a number": ({"labels": "float32"}, (sample_pixels(0), "1.0"), TypeError, "label"),
}


@pytest.mark.parametrize("name", WRONG_SAMPLES)
def test_a_sample_of_other_parts_is_refused_and_nothing_is_added(tmp_path: Path, name: str) -> None:
    options, sample, kind, word = WRONG_SAMPLES[name]
    arguments = {"sample_shape": SHAPE, "arrays": {"latent": ("array", "float16", (2, 3))}, **options}
    with ShardWriter(tmp_path / "out", arguments.pop("sample_shape"), **arguments) as writer:
        with pytest.raises(kind, match=word):
            writer.append(*sample, latent=latent_of(0))
        good = {"int64": 1, "float32": 1.0, None: None}.get(arguments.get("labels", "int64"), [1, 2, 3])
        writer.append(
            None if options.get("sample_shape", SHAPE) is None else sample_pixels(0), good, latent=latent_of(0)
        )
    assert len(open_shards(tmp_path / "out")) == 1


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"labels": "float64"}, "labels"),
        ({"labels": ("float32", 0)}, "shape"),
        ({"labels": None, "classes": ["a"]}, "classes"),
        ({"labels": ("float32", 3), "classes": ["a", "b"]}, "classes"),
        ({"arrays": {"labels": ("array", "float32", ())}}, "labels"),
        ({"sample_shape": None}, "arrays"),
        ({"sample_shape": None, "arrays": {"m": ("mask", "uint8", (2, 2))}}, "pixels"),
    ],
)
def test_a_writer_of_parts_that_no_set_has_is_refused(tmp_path: Path, options: dict[str, Any], word: str) -> None:
    arguments = {"sample_shape": SHAPE, **options}
    with pytest.raises(ValueError, match=word):
        ShardWriter(tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("pixels", [True, False])
@pytest.mark.parametrize("labels", LABELS)
def test_sets_of_all_parts_are_changed_and_merged(tmp_path: Path, labels: str, pixels: bool) -> None:
    out = write(tmp_path / "out", labels, pixels=pixels)
    change(out, tmp_path / "some", keep=Selection(indices=[5, 2, 2, 20]))
    more = write(tmp_path / "more", labels, pixels=pixels, first=100)
    merge([tmp_path / "some", more], tmp_path / "all", same_keys="allow")
    samples = [5, 2, 2, 20, *range(100, 100 + COUNT)]
    for one, i in zip(open_shards(tmp_path / "all"), samples, strict=True):
        np.testing.assert_array_equal(one.label, LABELS[labels][1](i))
        assert np.array_equal(one.arrays["latent"], latent_of(i))
        assert (one.image is None) is not pixels
    assert verify(tmp_path / "all").ok


def test_labels_take_the_place_of_labels_of_another_kind(tmp_path: Path) -> None:
    out = write(tmp_path / "out", "none")
    numbers = {f"{i:03}": i % 3 for i in range(COUNT)}
    change(out, tmp_path / "numbered", labels=numbers)
    assert open_shards(tmp_path / "numbered").labels.tolist() == list(numbers.values())
    named = {key: "abc"[number] for key, number in numbers.items()}
    change(out, tmp_path / "named", labels=named, classes="new")
    assert open_shards(tmp_path / "named").classes == ("a", "b", "c")
    values = np.linspace(0, 1, COUNT, dtype=np.float32)
    change(tmp_path / "named", tmp_path / "floats", arrays={"labels": values})
    assert np.array_equal(open_shards(tmp_path / "floats").labels, values)
    assert "label" not in (open_shards(tmp_path / "floats").index.dtype.names or ())
    change(tmp_path / "floats", tmp_path / "again", labels=numbers)
    assert load_manifest(tmp_path / "again").splits["train"].arrays.keys() == {"latent"}
    with pytest.raises(ShardioError, match="label for each sample"):
        change(out, tmp_path / "half", labels={"000": 1})
    with pytest.raises(ValueError, match="integer labels"):
        change(out, tmp_path / "chosen", keep=Selection(classes=[1]))


def test_sets_with_and_without_labels_or_pixels_are_not_merged(tmp_path: Path) -> None:
    numbers, none = write(tmp_path / "a"), write(tmp_path / "b", "none", first=100)
    latents = write(tmp_path / "c", "none", pixels=False, first=100)
    for one, two, word in ((numbers, none, "labels"), (none, latents, "samples")):
        with pytest.raises(ConvertError, match=word):
            merge([one, two], tmp_path / "all")
    other = write(tmp_path / "d", "none", split="extra")
    merge([numbers, other], tmp_path / "both", same_images="keep")
    assert open_shards(tmp_path / "both", "extra")[0].label is None
