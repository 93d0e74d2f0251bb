"""Datasets of Python as sources: each item once, as given, with the label that came with it; or a clear refusal."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conversions import Interrupt, rejects
from folders import everything, put
from numpy.typing import NDArray
from pictures import encode, random_picture
from PIL import Image
from torch.utils.data import Subset, TensorDataset

from shardio.conversion.convert import convert
from shardio.conversion.images.decode import decode_image
from shardio.conversion.sources.collection import DatasetItem
from shardio.conversion.sources.datasets import list_datasets
from shardio.errors import ConvertError, DecodeError, SourceError
from shardio.loading.loader import ShardLoader
from shardio.reading.shardset import open_shards
from shardio.sets.verify import verify

SIZE = 16
OPTIONS: dict[str, Any] = {"size": SIZE, "shard_size": 4096 + 5 * SIZE * SIZE * 3, "order": "source"}
"""Shards of five samples, in the order of the items."""


def picture(i: int, height: int = SIZE, width: int = SIZE) -> NDArray[np.uint8]:
    return random_picture(np.random.default_rng(i), height, width)


def pairs(count: int, **kwargs: int) -> list[tuple[NDArray[np.uint8], int]]:
    return [(picture(i, **kwargs), i % 3) for i in range(count)]


@dataclass
class Pictures:
    """A dataset that can be sent to other processes."""

    count: int
    classes: Sequence[str] = ("a", "b", "c")
    bad: Mapping[int, Any] = field(default_factory=dict)
    """Items to raise, if they are exceptions, or to give."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            if isinstance(self.bad[index], BaseException):
                raise self.bad[index]
            return self.bad[index]
        return picture(index), index % 3


def check_set(out: Path, split: str, count: int, keys: str = "{}") -> None:
    shards = open_shards(out, split)
    assert len(shards) == count
    assert shards.labels.tolist() == [i % 3 for i in range(count)]
    assert shards.index["key"].tolist() == [keys.format(i).encode() for i in range(count)]
    assert set(shards.index["source_height"].tolist()) == {SIZE}
    for i, (image, _) in enumerate(shards):
        np.testing.assert_array_equal(image, picture(i))


def test_splits_are_a_mapping_of_datasets(tmp_path: Path) -> None:
    classes = ("a", "b", "c", "never seen")
    src = {"Train": Pictures(12, classes), "validation": pairs(7), "extra": Pictures(3, classes)}
    convert(src, tmp_path / "out", **OPTIONS)
    for split, count in (("train", 12), ("val", 7), ("extra", 3)):
        check_set(tmp_path / "out", split, count, split + "/{}")
        shards = open_shards(tmp_path / "out", split)
        assert (shards.classes, shards.manifest.class_names) == (classes, ())
    convert(pairs(4), tmp_path / "numbered", **OPTIONS)
    assert open_shards(tmp_path / "numbered").classes == ("0", "1", "2")


def test_torch_datasets_are_datasets(tmp_path: Path) -> None:
    images = torch.stack([torch.from_numpy(picture(i)).permute(2, 0, 1) for i in range(23)])
    dataset = TensorDataset(images, torch.arange(23) % 3)
    convert(Subset(dataset, range(11)), tmp_path / "subset", **OPTIONS)
    check_set(tmp_path / "subset", "train", 11)


def test_a_dataset_is_called_by_the_calling_thread_alone_and_in_order_and_may_use_its_memory_again(
    tmp_path: Path,
) -> None:
    """A loop would do the same. Connections to databases and file handles may demand it."""
    calls: list[tuple[int, int]] = []
    memory = np.empty((SIZE, SIZE, 3), np.uint8)

    class Watched(Pictures):
        def __getitem__(self, index: int) -> Any:
            calls.append((threading.get_ident(), index))
            memory[...] = picture(index)
            return memory, index % 3

    convert(Watched(23), tmp_path / "out", **OPTIONS)
    check_set(tmp_path / "out", "train", 23)
    assert {thread for thread, _ in calls} == {threading.get_ident()}
    assert [index for _, index in calls[-23:]] == list(range(23))
    assert len(calls) == 23 + 2 * 8 + 1  # the items that are tried, twice, and the first for the kind of its label
    assert not np.shares_memory(decode_image(memory).pixels, memory)


RGB = picture(1, 5, 7)
GRAY = RGB[:, :, 0]
RGBA = np.dstack([RGB, np.where(GRAY > 128, 255, 0).astype(np.uint8)])
OVER_WHITE = np.where(RGBA[:, :, 3:] == 255, RGB, 255).astype(np.uint8)
GRAY_RGB = np.repeat(GRAY[:, :, None], 3, axis=2)


def tensor(pixels: NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


IMAGES: dict[str, tuple[Any, NDArray[np.uint8]]] = {
    "array": (RGB, RGB),
    "Fortran array": (np.asfortranarray(RGB), RGB),
    "reversed view": (RGB[::-1, ::-1], RGB[::-1, ::-1]),
    "read-only array": (np.frombuffer(RGB.tobytes(), np.uint8).reshape(RGB.shape), RGB),
    "gray array": (GRAY, GRAY_RGB),
    "array of one channel": (GRAY[:, :, None], GRAY_RGB),
    "array with alpha": (RGBA, OVER_WHITE),
    "view with alpha": (np.concatenate([RGBA, RGBA], 1)[:, :7], OVER_WHITE),
    "three rows": (RGB[:3], RGB[:3]),
    "PIL": (Image.fromarray(RGB), RGB),
    "a file that Pillow opens lazily": (Image.open(io.BytesIO(encode(RGB, "PNG"))), RGB),
    "PIL of a palette": (Image.fromarray(GRAY).convert("P"), GRAY_RGB),
    "PIL of bits": (Image.fromarray(GRAY > 128), np.where(GRAY_RGB > 128, np.uint8(255), np.uint8(0))),
    "gray PIL with alpha": (Image.fromarray(GRAY).convert("LA"), GRAY_RGB),
    "gray PIL": (Image.fromarray(GRAY), GRAY_RGB),
    "PIL with alpha": (Image.fromarray(RGBA), OVER_WHITE),
    "16 bits": (Image.fromarray(GRAY.astype(np.uint16) * 257), GRAY_RGB),
    "16 bits in 32": (Image.fromarray(GRAY.astype(np.int32) * 257), GRAY_RGB),
    "encoded": (encode(RGB, "PNG"), RGB),
    "tensor": (tensor(RGB), RGB),
    "contiguous tensor": (tensor(RGB).contiguous(), RGB),
    "gray tensor": (torch.from_numpy(GRAY.copy()), GRAY_RGB),
    "tensor of one channel": (torch.from_numpy(GRAY.copy())[None], GRAY_RGB),
    "tensor with alpha": (tensor(RGBA), OVER_WHITE),
    "tensor three wide": (tensor(RGB[:, :3]), RGB[:, :3]),
}


def item_of(item: Any) -> DatasetItem:
    found = list_datasets([item]).collect()
    read = found.origin.read(found.splits["train"][0])
    assert isinstance(read, DatasetItem)
    return read


@pytest.mark.parametrize("name", IMAGES)
def test_every_kind_of_image_is_read_as_it_is(name: str) -> None:
    image, expected = IMAGES[name]
    for one in (item_of((image, 0)).image, *([] if isinstance(image, torch.Tensor) else [image])):
        np.testing.assert_array_equal(decode_image(one).pixels, expected, strict=True)


OTHERS: dict[str, tuple[Any, str]] = {
    "floats": (RGB.astype(np.float32) / 255, r"found an array of float32, shape \(5, 7, 3\)"),
    "bools": (GRAY > 128, r"found an array of bool, shape \(5, 7\)"),
    "int64": (RGB.astype(np.int64), "found an array of int64"),
    "channels first": (np.moveaxis(RGB, 2, 0), r"found an array of uint8, shape \(3, 5, 7\)"),
    "two channels": (RGB[:, :, :2], r"shape \(5, 7, 2\)"),
    "a batch": (RGB[None], r"shape \(1, 5, 7, 3\)"),
    "a row": (GRAY[0], r"shape \(7,\)"),
    "a float tensor": (tensor(RGB) / 255, r"a uint8 tensor .*, found float32, shape \(3, 5, 7\)"),
    "a tensor with channels last": (torch.from_numpy(RGB.copy()), r"found uint8, shape \(5, 7, 3\)"),
    "a path": ("1.jpg", "found str"),
    "a list": (RGB.tolist(), "found list"),
    "nothing": (None, "found NoneType"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_images_are_the_callers_mistake_and_named_with_the_item(name: str) -> None:
    image, found = OTHERS[name]
    if not isinstance(image, torch.Tensor):
        with pytest.raises(TypeError, match=f"^expected a PIL image, encoded bytes or a uint8 array .*{found}"):
            decode_image(image)
    with pytest.raises(TypeError, match=rf"^dataset 'train', item 0: expected .*{found}"):
        list_datasets([(image, 0)] * 3)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.empty((0, 5, 3), np.uint8), r"empty: .*found an array of shape \(0, 5, 3\)"),
        (np.broadcast_to(np.uint8(0), (1 << 20, 1 << 20)), "too large: .*found 1048576 x 1048576"),
        (Image.fromarray(GRAY.astype(np.float32)), "unsupported: .*in a PIL image of mode F"),
        (Image.fromarray(GRAY.astype(np.int32) * 70000), "unsupported: .*PIL image of mode I"),
        (Image.fromarray(GRAY.astype(np.int32) - 1000), "unsupported: .*PIL image of mode I"),
    ],
)
def test_images_of_the_right_kind_that_cannot_be_taken_are_refused(image: Any, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        decode_image(image)


def test_a_mistake_that_shows_late_names_its_item_and_the_mended_dataset_goes_on(tmp_path: Path) -> None:
    """Items that are not tried beforehand: the finished shards are kept, as after any error."""
    for item, error, message in [
        ((RGB, 3), ValueError, "expected a label from 0 to 2, found 3"),
        ((RGB, "cat"), TypeError, "found 'cat'"),
        ((RGB, 1.5), TypeError, "type .* of 0, found 1.5"),
        ((RGB.astype(float), 0), TypeError, "float64"),
        (RGB, TypeError, "type .* of 0, found None"),
        ((RGB, 0, 1), TypeError, r"expected \(image, label\) or an image, found tuple of length 3"),
        ({"picture": RGB}, TypeError, "the key image, found picture"),
    ]:
        with pytest.raises(error, match=rf"^dataset 'train', item 17: .*{message}"):
            convert(Pictures(40, bad={17: item}), tmp_path / "out", **OPTIONS)
    assert len(list((tmp_path / "out").glob("train-*.npy"))) == 3
    assert convert(Pictures(40), tmp_path / "out", **OPTIONS).num_converted == 25
    check_set(tmp_path / "out", "train", 40)


def test_items_may_have_no_labels(tmp_path: Path) -> None:
    unlabeled: dict[str, Any] = {"images": RGB, "tuples": (RGB,), "dicts": {"image": RGB}, "none": (RGB, None)}
    for name, item in unlabeled.items():
        report = convert({"train": [item] * 5}, tmp_path / name, **OPTIONS)
        assert report.unlabeled == ("train",)
        shards = open_shards(tmp_path / name)
        assert (shards.content.label_row, shards.classes, shards[0].label) == (None, (), None)
    with ShardLoader(tmp_path / "none", batch_size=5) as loader:
        ((images,),) = list(loader)
    assert images.shape == (5, 3, SIZE, SIZE)


@pytest.mark.parametrize(
    "labels",
    [
        [0.5, np.float64(-2), 3, torch.tensor(0.1)],
        [[0.5, 1], (1, 0), np.array([0.25, 0.75]), torch.tensor([True, False])],
    ],
    ids=["numbers", "vectors"],
)
def test_labels_may_be_numbers_and_vectors_which_are_float32(tmp_path: Path, labels: list[Any]) -> None:
    source = [(RGB, label) for label in labels]
    report = convert(source, tmp_path / "out", **OPTIONS)
    assert report.unlabeled == ()
    expected = np.array([np.asarray(label, np.float32) for label in labels])
    np.testing.assert_array_equal(open_shards(tmp_path / "out").labels, expected, strict=True)
    assert verify(tmp_path / "out").ok
    assert convert(source, tmp_path / "other", **OPTIONS).digest == report.digest


def test_a_vector_of_labels_may_have_a_class_for_each_number(tmp_path: Path) -> None:
    class Tagged(list[Any]):
        classes = ("sky", "sea")

    convert(Tagged([(RGB, [1, 0])]), tmp_path / "out", **OPTIONS)
    assert open_shards(tmp_path / "out").classes == ("sky", "sea")
    with pytest.raises(ValueError, match=r"expected 3 `classes`, .*found 2"):
        convert(Tagged([(RGB, [1, 0, 0])]), tmp_path / "three", **OPTIONS)


def test_texts_are_classes(tmp_path: Path) -> None:
    splits = {"train": [(picture(i), "badc"[i]) for i in range(4)], "val": [{"image": picture(9), "labels": "c"}]}
    convert(splits, tmp_path / "out", **OPTIONS)
    assert open_shards(tmp_path / "out").classes == ("a", "b", "c", "d")
    assert open_shards(tmp_path / "out").labels.tolist() == [1, 0, 3, 2]
    assert open_shards(tmp_path / "out", "val").labels.tolist() == [2]
    bad = {0: (picture(0), "b"), 1: (picture(1), "a"), 2: (picture(2), "b")}
    convert(Pictures(3, classes=("b", "a"), bad=bad), tmp_path / "listed", **OPTIONS)
    assert open_shards(tmp_path / "listed").labels.tolist() == [0, 1, 0]


NAMED: dict[str, tuple[dict[str, Any], Any]] = {
    "labels": ({"labels": 2}, 2),
    "fine_label": ({"fine_label": 2, "caption": "x"}, 2),
    "Class": ({"Class": "x"}, 0),
    "label before others": ({"label": 2, "class_name": "x", "labels": [1]}, 2),
    "captions": ({"caption": "x", "width": 3}, None),
    "two names": ({"fine_label": 2, "coarse_label": 1}, "fine_label"),
    "a dict": ({"target": {"boxes": [1]}}, "number"),
}


@pytest.mark.parametrize("name", NAMED)
def test_labels_in_dicts_are_found_by_their_names(name: str) -> None:
    given, expected = NAMED[name]
    if isinstance(expected, str):
        with pytest.raises((TypeError, ValueError), match=f"item 0: .*{expected}"):
            list_datasets([{"image": RGB, **given}])
        return
    assert item_of({"image": RGB, **given}).label == expected


def test_datasets_without_classes_have_as_many_as_the_largest_label_of_all_splits(tmp_path: Path) -> None:
    splits: dict[str, Any] = {"train": [(RGB, 1)], "val": [(RGB, 11)], "test": Pictures(1, classes=[])}
    convert(splits, tmp_path / "out", **OPTIONS)
    assert open_shards(tmp_path / "out").classes == tuple(map(str, range(12)))


def test_ids_and_synonyms_of_imagenet_become_classes_and_their_names(tmp_path: Path) -> None:
    """torchvision's ImageNet has such classes."""
    src: Any = Pictures(5, classes=[("tench", "Tinca tinca"), ("crane",), ("crane",)])  # type: ignore[list-item]
    src.wnids = ("n01440764", "n02012849", "n03126707")
    convert(src, tmp_path / "out", **OPTIONS)
    shards = open_shards(tmp_path / "out")
    assert shards.classes == src.wnids
    assert shards.class_names == ("tench, Tinca tinca", "crane", "crane")
    less: Any = Pictures(5, classes=src.classes[:2])
    less.wnids = src.wnids[:2]
    with pytest.raises(ValueError, match=r"expected the 3 `classes` of 'train', found 2 classes: make them the same"):
        convert({"train": src, "val": less}, tmp_path / "other", **OPTIONS)


@pytest.mark.parametrize(
    ("src", "error", "message"),
    [
        (iter([(RGB, 0)]), TypeError, "found list_iterator. .*shardio.ShardWriter"),
        (3, TypeError, "found int"),
        ({"train": "images/"}, TypeError, "found str"),
        ({"train": None}, TypeError, "found NoneType"),
        ({1: [(RGB, 0)]}, ValueError, "split must match .* found 1"),
        ({"../x": [(RGB, 0)]}, ValueError, "split must match .* found '../x'"),
        ({}, SourceError, "expected a dict with a dataset for each split, found an empty dict"),
        ([], SourceError, "dataset 'train': expected items, found none"),
        ({"train": [(RGB, 0)], "val": ()}, SourceError, "dataset 'val': expected items, found none"),
        ({"val": Pictures(3), "validation": Pictures(4)}, ValueError, "one name for the split 'val', found 'val' and"),
        ({"train": [(RGB, "a")], "val": [(RGB, "x")]}, ValueError, "'val': .*classes of 'train' as label, found 'x'"),
        ([(RGB, 0.5), (RGB, 10**39)], TypeError, "item 1: label must be a number"),
        (
            {"train": Pictures(3), "other": pairs(3), "val": Pictures(3, classes=["a", "c", "b"])},
            ValueError,
            r"^dataset 'val': expected the 3 `classes` of 'train', found 3 classes, 'c' instead of 'b'",
        ),
        *(
            ([(RGB, label) for label in labels], ValueError, "as label, found")
            for labels in (["a", "3", "b"], ["a", 0], ["a", None], ["a", -1.5], ["a", "nan", "-1"])
        ),
        *(
            ([(RGB, label)], error, rf"^dataset 'train', item 0: .*{message}")
            for label, error, message in (
                (np.zeros((2, 2)), TypeError, "vector .* as label, found array"),
                ([], TypeError, r"vector .* as label, found \[\]"),
                (np.array([1]), TypeError, "a vector of at least two"),
                (1e99, ValueError, "must fit in float32"),
                (-1, ValueError, "expected a label from 0 to 1048575, found -1"),
                (1 << 20, ValueError, "expected a label from 0 to 1048575, found 1048576"),
            )
        ),
        *(
            (Pictures(3, classes=classes), error, f"^dataset 'train': .*{message}")  # type: ignore[arg-type]
            for classes, error, message in (
                ([["a"], ["b"], ["c"]], TypeError, "sequence of names"),
                (3, TypeError, "sequence of names, found '3'"),
                ("abc", TypeError, "sequence of names, found 'abc'"),
                ([0, 1, 2], TypeError, "sequence of names"),
                (["a", "b", "a"], ValueError, "distinct classes, found 'a' twice"),
                (["a", "b\ud800", "c"], ValueError, r"classes must be .* found 'b\\ud800'"),
            )
        ),
    ],
)
def test_what_is_no_dataset_is_refused_before_anything_is_written(
    tmp_path: Path, src: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        convert(src, tmp_path / "out", **OPTIONS)
    assert not (tmp_path / "out").exists()


def test_a_dataset_with_random_transforms_is_refused(tmp_path: Path) -> None:
    class Augmented(Pictures):
        def __getitem__(self, index: int) -> Any:
            return np.random.default_rng().integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8), 0

    with pytest.raises(ValueError, match=r"item 0: expected the same image and label at every call.*random transforms"):
        convert(Augmented(100), tmp_path / "out", **OPTIONS)
    assert not (tmp_path / "out").exists()


def test_items_that_raise_are_refused_and_listed_also_by_processes(tmp_path: Path) -> None:
    bad = {4: OSError("image file is truncated (7 bytes)"), 5: KeyError("x"), 9: (encode(RGB, "PNG")[:60], 0)}
    report = convert(Pictures(23, bad=bad), tmp_path / "out", **OPTIONS, max_bad=3, workers=2)
    assert dict(report.num_samples) == {"train": 20}
    found = {line["key"]: (line["reason"], line["detail"]) for line in rejects(tmp_path / "out")}
    assert found["4"] == ("unreadable", "OSError: image file is truncated (7 bytes)")
    assert found["5"] == ("unreadable", "KeyError: 'x'")
    assert found["9"][0] == "damaged"
    assert open_shards(tmp_path / "out").labels.tolist() == [i % 3 for i in range(23) if i not in bad]


def test_a_dataset_that_gives_nothing_but_errors_is_refused_at_once_with_their_cause(tmp_path: Path) -> None:
    cause = AttributeError("'Broken' has no attribute 'images'")
    with pytest.raises(SourceError, match=r"items \[0, .*22\] .*unreadable: AttributeError") as caught:
        convert(Pictures(23, bad=dict.fromkeys(range(23), cause)), tmp_path / "out", **OPTIONS)
    assert caught.value.__cause__ is cause
    assert not (tmp_path / "out").exists()


def test_what_is_no_fault_of_an_item_is_not_put_down_to_it(tmp_path: Path) -> None:
    for error in (MemoryError(), OSError(24, "Too many open files"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            convert(Pictures(40, bad={17: error}), tmp_path / "out", **OPTIONS, max_bad=40)
    convert(Pictures(40), tmp_path / "out", **OPTIONS)
    check_set(tmp_path / "out", "train", 40)


def test_a_dataset_that_cannot_be_sent_to_workers_is_converted_here_or_refused_with_the_way_out(tmp_path: Path) -> None:
    src: Any = Pictures(23)
    src.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"TypeError: cannot pickle .*lock.* leave out `workers`"):
        convert(src, tmp_path / "out", **OPTIONS, workers=2)
    assert not (tmp_path / "out").exists()
    for number, options in enumerate(({}, {"workers": 1})):
        convert(src, tmp_path / str(number), **OPTIONS, **options)
        check_set(tmp_path / str(number), "train", 23)


def test_a_dataset_of_an_interactive_session_is_refused_before_workers_die_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = ModuleType("__main__")
    vars(session)["Mine"] = type("Mine", (list,), {"__module__": "__main__"})
    monkeypatch.setitem(sys.modules, "__main__", session)
    data = session.Mine(pairs(9))
    with pytest.raises(TypeError, match="import Mine"):
        convert(data, tmp_path / "out", **OPTIONS, workers=2)
    assert convert(data, tmp_path / "out", **OPTIONS).num_converted == 9


class Named(Pictures):
    """Another class with the same items."""


def test_another_dataset_into_the_same_folder_is_refused(tmp_path: Path) -> None:
    """The class, the length, the classes, the targets and a few of the items tell one dataset from another."""
    targeted: Any = Pictures(23)
    targeted.targets = (0, 1, 2)
    different: dict[str, Any] = {
        "another class": Named(23),
        "another length": Pictures(24),
        "other targets": targeted,
        "other class names": Pictures(23, classes=("a", "b", "d")),
        "other images": Pictures(23, bad={i: (picture(i + 1), i % 3) for i in range(23)}),
        "other labels": Pictures(23, bad={i: (picture(i), (i + 1) % 3) for i in range(23)}),
        "an image that is tried and cannot be read": Pictures(23, bad={0: OSError("gone")}),
        "splits": {"train": Pictures(23)},
    }
    with pytest.raises(KeyboardInterrupt):
        convert(Pictures(23), tmp_path / "out", **OPTIONS, on_progress=Interrupt(12))
    before = everything(tmp_path / "out")
    for name, src in different.items():
        with pytest.raises(ConvertError, match=r"unfinished conversion .*the list of sources changed"):
            convert(src, tmp_path / "out", **OPTIONS, max_bad=1)
        assert everything(tmp_path / "out") == before, name


def test_what_only_files_have_is_refused(tmp_path: Path) -> None:
    for options, message in (
        ({"source": "tree"}, "`source` is for"),
        ({"labels": "none"}, "`labels` is for"),
        ({"empty_classes": "omit"}, "`empty_classes` is for"),
        ({"unlabeled": "skip"}, "`unlabeled` is for"),
        ({"masks": tmp_path}, "`masks` is for"),
        ({"scheduler": "tcp://127.0.0.1:8786", "workers": 2}, "workers must be 1 or None; found 2"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(Pictures(3), tmp_path / "out", **OPTIONS, **options)
    assert not (tmp_path / "out").exists()


def test_encoded_items_are_turned_and_reduced_as_files_are_and_decoded_ones_left_as_they_are(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 3
    data = encode(picture(0, 160, 160), "JPEG", exif=turned)
    put(tmp_path / "tree", "1.jpg", content=data)
    options: dict[str, Any] = {**OPTIONS, "exif_rotate": True, "quality": "fast"}
    convert(tmp_path / "tree", tmp_path / "files", **options)
    with Image.open(io.BytesIO(data)) as image:
        convert([data, image], tmp_path / "out", **options, background=(1, 2, 3))
        convert([image, np.zeros((SIZE, SIZE, 4), np.uint8)], tmp_path / "plain", **OPTIONS, background=(1, 2, 3))
    encoded, decoded = (sample.image for sample in open_shards(tmp_path / "out"))
    left, transparent = (sample.image for sample in open_shards(tmp_path / "plain"))
    np.testing.assert_array_equal(encoded, open_shards(tmp_path / "files")[0].image)
    np.testing.assert_array_equal(decoded, left)
    assert not np.array_equal(encoded, decoded)
    np.testing.assert_array_equal(transparent, np.broadcast_to(np.uint8([1, 2, 3]), (SIZE, SIZE, 3)))
