"""Lists and reads the items of Python datasets: objects with a length that return (image, label) for an index.

A dataset is used as in a plain loop: one thread reads one item at a time, so a dataset need not be thread safe. A
dataset need not list its labels in advance, because each item comes with its label.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.arrays import ARRAY, ArraySpec, Label, as_float32, declare, label_array, label_name
from shardio.conversion.images.decode import check_object, decode_image
from shardio.conversion.images.warned import KeptWarnings
from shardio.conversion.sources.collection import Collection, DatasetItem, Item, Origin, Source, is_want
from shardio.conversion.sources.listing import Found, Listing
from shardio.conversion.sources.names import DEFAULT_SPLIT, by_split, check_label, number_labels
from shardio.conversion.sources.table import LABEL_NAMES
from shardio.errors import DecodeError, SourceError, counted
from shardio.format.layout import LABELS_NAME, MAX_CLASSES, check_split_name
from shardio.format.parse import check_text, first_repeated

if TYPE_CHECKING:
    import torch

# Enough that a random transform shows itself.
_MOST_TRIED = 8


class Dataset(Protocol):
    """An object with `len(dataset)`, and `dataset[i]`, which returns the same item at every call: (image, label).

    Map-style datasets of torch and torchvision qualify, and so does a list. `i` is from 0 to len(dataset) - 1.

    - The image is a PIL image, encoded bytes, a uint8 array (height, width[, C]) or a uint8 tensor ([C, ]height, width)
    - The label is an integer, another number, a vector of numbers, a text, or missing. Numbers and vectors become
      float32. Texts are classes; without `classes`, all items are read once beforehand
    - An item may also be a dict with "image", perhaps "label" (or "labels", ...), and a value for each declared array
    - For a set without pixels, an item is an array, or a dict of arrays, perhaps with "label"
    - `classes`, if present, has the names of the classes, or of the numbers in a label vector. `targets`, if present,
      only helps to recognize the dataset
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class DatasetOrigin(Origin):
    """Reads the items of the dataset of each split. Thread safe only if the datasets are. `num_classes` is 0 if classes
    have no names. `identity` is a hash (hex) that tells the datasets from others."""

    datasets: Mapping[str, Dataset]
    num_classes: int
    identity: str
    like: Label
    """The label of the first item; 0 if it is a text. All labels must have its type, and vectors also its length."""
    arrays: tuple[ArraySpec, ...] = ()
    has_pixels: bool = True
    numbers: Mapping[str, int] = field(default_factory=dict)
    """The number of each class, by the text that items have as label; empty if labels are not texts."""

    def read(self, source: Source) -> DatasetItem:
        """Returns an item. Raises DecodeError if the dataset fails, TypeError or ValueError if the item is invalid."""
        name, number = source.item()
        split = name.decode()
        item, where = _get(self.datasets[split], number), f"dataset {split!r}, item {number}"
        names = [spec.name for spec in self.arrays]
        image, told, given = _parts(item, where, self.has_pixels, names)
        if self.numbers:
            if not isinstance(told, str) or told not in self.numbers:
                raise ValueError(f"{where}: expected the name of a class as label, found {told!r:.80}")
            told = self.numbers[told]
        if any(name not in given for name in names):
            found = f"the keys {', '.join(map(str, item))}" if isinstance(item, Mapping) else type(item).__name__
            expected = ", ".join(["image"] * self.has_pixels + names)
            raise TypeError(f"{where}: expected a dict with the keys {expected}, found {found:.200}")
        if not self.has_pixels and (extra := [name for name in given if name not in {"label", LABELS_NAME, *names}]):
            raise TypeError(f"{where}: expected only arrays that the first item has, found {extra[0]!r:.80}")
        try:
            torch = sys.modules.get("torch")  # without it, there are no tensors
            if self.has_pixels:
                image = check_object(_to_array(image) if torch and isinstance(image, torch.Tensor) else image)
        except TypeError as error:
            raise TypeError(f"{where}: {error}") from None
        label = _label(told, where, as_floats=isinstance(self.like, tuple))
        if _kind(label) != _kind(self.like):
            raise TypeError(
                f"{where}: expected a label of the type and length of {self.like!r:.80}, found {told!r:.80}"
            )
        most = (self.num_classes or MAX_CLASSES) - 1
        if isinstance(label, int) and not 0 <= label <= most:
            raise ValueError(f"{where}: expected a label from 0 to {most}, found {label}")
        values = {}
        for spec in self.arrays:
            check = spec.check_dtype if spec.kind == "mask" else spec.check  # a mask has the size of its picture
            # A copy, as the dataset may use its memory again for the next item.
            values[spec.name] = check(given[spec.name], f"{where}: ").copy()
        for spec in label_array(label):
            values[spec.name] = np.array(label, spec.dtype).reshape(spec.row.shape)
        return DatasetItem(image, label if isinstance(label, int) else None, values)

    def _fingerprints(self, sources: Sequence[Source]) -> list[str]:
        """Returns the same text, `identity`, for every source. So the text may stay the same if an item changes."""
        return [self.identity] * len(sources)

    def check_sendable(self) -> None:
        for split, dataset in self.datasets.items():
            try:
                ForkingPickler.dumps(dataset)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            else:
                if type(dataset).__module__ != "__main__" or hasattr(sys.modules["__main__"], "__file__"):
                    continue
                found = f"they cannot import {type(dataset).__name__}, which is defined in this session"
            raise TypeError(
                f"dataset {split!r} cannot be sent to worker processes ({found}): leave out `workers` and `scheduler` "
                "to convert it in this process"
            )


def list_datasets(src: Dataset | Mapping[str, Dataset], arrays: tuple[ArraySpec, ...] = ()) -> Listing:
    """Returns the Listing of the items of a dataset, or of a dict with a dataset for each split.

    Reads a few items of each dataset twice, to check that they do not change. Keys are the numbers of the items: b"17",
    or b"train/17" if `src` is a dict. Raises TypeError or ValueError for an object that is not a dataset or has invalid
    items, and SourceError for a dataset without readable items.
    """
    given: dict[str, Dataset] = dict(src) if isinstance(src, Mapping) else {DEFAULT_SPLIT: src}
    if not given:
        raise SourceError("expected a dict with a dataset for each split, found an empty dict")
    for split, dataset in given.items():
        check_split_name(split)
        if not _is_sequence(dataset):
            instead = f"{type(dataset).__name__}. For samples from an iterator, use shardio.ShardWriter"
            raise TypeError(f"dataset {split!r}: expected an object with len(dataset) and dataset[i], found {instead}")
        if not len(dataset):
            raise SourceError(f"dataset {split!r}: expected items, found none")
    datasets = by_split("datasets", given)
    found, like = _look_at_one(*next(iter(datasets.items())), arrays)
    arrays, has_pixels = found or arrays, not found
    classes, class_names = _common_classes(datasets) if like is not None else ((), ())
    numbers: Mapping[str, int] = {}
    if isinstance(like, str):
        numbers = {name: number for number, name in enumerate(classes)}
        if not numbers:
            classes, numbers = _number_texts(datasets, has_pixels, [spec.name for spec in arrays])
        like = 0
    if classes and isinstance(like, tuple) and len(like) != len(classes):
        raise ValueError(f"datasets: expected {len(like)} `classes`, one per number of a label, found {len(classes)}")
    origin = DatasetOrigin(datasets, len(classes), "", like, arrays, has_pixels, numbers)
    sha256 = hashlib.sha256()
    items: dict[str, list[Found]] = {}
    unknown = -1 if isinstance(like, int) else None  # until the item is read
    for split, dataset in datasets.items():
        kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
        sha256.update(f"{split}\0{kind}\0{len(dataset)}\0".encode())
        sha256.update(_targets(dataset))
        sha256.update(_try_items(split, origin))
        where, above = split.encode(), f"{split}/" if isinstance(src, Mapping) else ""
        items[split] = [
            Found(f"{above}{number}".encode(), unknown, Item(where, number)) for number in range(len(dataset))
        ]
    known = Collection(
        replace(origin, identity=sha256.hexdigest()),
        kind="dataset",
        identity=sha256.hexdigest(),
        notes=(f"labels are float32, {counted(len(like), 'number')} each",) if isinstance(like, tuple) else (),
        arrays=(*arrays, *(replace(spec, source="item") for spec in label_array(like))),
        has_pixels=has_pixels,
    )
    return Listing("datasets", items, known, classes, dict(zip(classes, class_names, strict=False)), keeps_order=True)


def _get(dataset: Dataset, number: int) -> Any:
    try:
        return dataset[number]
    except (DecodeError, MemoryError):
        raise
    except Exception as error:
        if is_want(error):
            raise
        raise DecodeError("unreadable", f"{type(error).__name__}: {error}") from error


def some_of(count: int) -> list[int]:
    """Returns up to 8 numbers from 0 to `count` - 1, evenly spaced: samples that tell datasets and files apart."""
    numbers: list[int] = np.unique(np.linspace(0, count - 1, _MOST_TRIED).astype(np.int64)).tolist()
    return numbers


def _look_at_one(
    split: str, dataset: Dataset, declared: tuple[ArraySpec, ...]
) -> tuple[tuple[ArraySpec, ...], Label | str]:
    """Returns (specs of the arrays, label) of the first item that can be read; ((), None) if there is none. The specs
    are () for an item with an image; `declared` are the caller's specs."""

    def look(item: Any, where: str) -> tuple[tuple[ArraySpec, ...], Label | str]:
        arrays = _find_arrays(item, where, declared)
        told = _parts(item, where, not arrays, [spec.name for spec in arrays or declared])[1]
        return arrays, told if isinstance(told, str) else _label(told, where)

    for number in some_of(len(dataset)):
        with contextlib.suppress(DecodeError), KeptWarnings():  # an item may warn when it is freed, which is here
            return look(_get(dataset, number), f"dataset {split!r}, item {number}")
    return (), None


def _number_texts(
    datasets: Mapping[str, Dataset], has_pixels: bool, arrays: Sequence[str]
) -> tuple[tuple[str, ...], Mapping[str, int]]:
    """Reads all items, whose labels are texts. Returns (classes, the number of each class by its text). `arrays` are
    the names of the arrays in the items."""
    written = set()
    for split, dataset in datasets.items():
        for number in range(len(dataset)):
            with contextlib.suppress(DecodeError), KeptWarnings():
                told = _parts(_get(dataset, number), f"dataset {split!r}, item {number}", has_pixels, arrays)[1]
                written |= {(split, told)} if isinstance(told, str) else set()
    found = number_labels(written)
    for (split, text), expected in found.expected.items():
        raise ValueError(f"dataset {split!r}: expected {expected} as label, found {text!r:.80}")
    return found.classes, found.labels


def _find_arrays(item: Any, where: str, declared: tuple[ArraySpec, ...]) -> tuple[ArraySpec, ...]:
    """Returns the specs of the arrays in an item without an image; () if the item has an image, or may be an image.
    `declared` are the specs of the caller. Errors begin with `where`."""
    values = item if isinstance(item, Mapping) else {ARRAY: item} if hasattr(item, "dtype") else {}
    if "image" in values:
        return ()
    label = label_name(values, f"{where}: ")
    names = [name for name in values if name != label]
    stored = [spec.name for spec in declared] or [name for name in names if hasattr(values[name], "dtype")]
    if not names or not set(names) <= set(stored):
        return ()
    if wrong := [spec.name for spec in declared if spec.kind != "array"]:
        raise ValueError(f'{where}: array {wrong[0]!r}: expected the kind "array", because items have no "image"')
    try:
        found = {name: np.asarray(values[name]) for name in names}
        for name, value in found.items() if not declared else ():
            if value.dtype == np.uint8 and value.ndim in (2, 3):
                if not isinstance(item, Mapping):
                    return ()
                declaration = f'arrays={{{name!r}: ("array", "uint8", {value.shape})}}'
                raise ValueError(
                    f"the array {name!r} may be an image: rename it to `image`, or declare it by {declaration}"
                )
        return declared or declare({name: ("array", value.dtype, value.shape) for name, value in found.items()}, None)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: of tensors
        raise ValueError(f"{where}: {error}") from None


def _parts(item: Any, where: str, has_pixels: bool, arrays: Sequence[str]) -> tuple[Any, Any, Mapping[str, Any]]:
    """Returns (image, label, all values by name) of an item. The image is None if samples have no pixels, and the label
    is None if it is missing. `arrays` are the names of arrays, which are no labels. Errors begin with `where`."""
    if not has_pixels:
        values = item if isinstance(item, Mapping) else {ARRAY: item}
        return None, values.get(label_name(values, f"{where}: ")), values
    if isinstance(item, Mapping):
        if "image" not in item:
            raise TypeError(f"{where}: expected a dict with the key image, found {', '.join(map(str, item))[:200]}")
        names = [name for name in item if str(name).lower() in LABEL_NAMES and name not in arrays]
        if len(names) > 1 and "label" not in names:
            found = f"found {names[0]!r} and {names[1]!r}: call the right one 'label'"
            raise ValueError(f"{where}: expected labels under one name, {found}")
        return item["image"], item.get("label" if "label" in names else next(iter(names), None)), item
    if not isinstance(item, (tuple, list)):
        return item, None, {}
    if len(item) not in (1, 2):
        found = f"{type(item).__name__} of length {len(item)}"
        raise TypeError(f"{where}: expected (image, label) or an image, found {found}")
    return item[0], item[1] if len(item) == 2 else None, {}


def _label(label: Any, where: str, *, as_floats: bool = False) -> Label:
    """Returns an item's label: an int, a tuple of float32 numbers, or None. `as_floats` makes tuples of ints, too."""
    if label is None:
        return None
    with contextlib.suppress(TypeError):
        number = check_label(label)
        if not as_floats:
            return number
        label = number
    try:
        numbers = as_float32(label)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None
    if numbers.ndim > 1 or numbers.shape in ((0,), (1,)):
        raise TypeError(f"{where}: expected a number or a vector of at least two numbers as label, found {label!r:.80}")
    return tuple(map(float, numbers.reshape(-1)))


def _kind(label: Label) -> object:
    return len(label) if isinstance(label, tuple) else type(label)


def _to_array(image: torch.Tensor) -> NDArray[np.uint8]:
    """Returns a tensor ([C, ]height, width) as an array (height, width[, C]). Raises TypeError for other tensors."""
    if str(image.dtype) != "torch.uint8" or not (image.ndim == 2 or (image.ndim == 3 and image.shape[0] in (1, 3, 4))):
        found = f"{str(image.dtype).removeprefix('torch.')}, shape {tuple(image.shape)}"
        raise TypeError(f"expected a uint8 tensor (height, width) or (1 | 3 | 4, height, width), found {found}")
    array: NDArray[np.uint8] = (image.permute(1, 2, 0) if image.ndim == 3 else image).numpy(force=True)
    return array


def _try_items(split: str, origin: DatasetOrigin) -> bytes:
    """Returns the sha256 digests of a few items of a split, joined: they tell its dataset from others. Raises
    ValueError if an item differs between two calls, and SourceError if none of the items can be read."""
    numbers = some_of(len(origin.datasets[split]))
    hashes = b""
    errors: list[DecodeError] = []
    for number in numbers:
        source = Source(b"", None, Item(split.encode(), number))
        try:
            with KeptWarnings():  # the conversion reads them again, and keeps the warnings
                first, again = (_hash_item(origin.read(source)) for _ in range(2))
        except DecodeError as error:
            errors.append(error)
            hashes += hashlib.sha256(error.reason.encode()).digest()
            continue
        if first != again:
            what = f"{'image, ' * origin.has_pixels}label and arrays" if origin.arrays else "image and label"
            raise ValueError(
                f"dataset {split!r}, item {number}: expected the same {what} at every call, found a difference between "
                "two calls: leave random transforms out here, and apply them in training"
            )
        hashes += first
    if len(errors) == len(numbers):
        raise SourceError(f"dataset {split!r}: none of the items {numbers} can be read; the first: {errors[0]}") from (
            errors[0].__cause__
        )
    return hashes


def _hash_item(given: DatasetItem) -> bytes:
    sha256 = hashlib.sha256(f"{given.label} ".encode())
    if given.image is not None:
        pixels = decode_image(given.image).pixels
        sha256.update(b"%d %d " % pixels.shape[:2] + pixels.tobytes())
    for name, value in given.arrays.items():
        sha256.update(f"\0{name} {value.shape}\0".encode() + value.tobytes())
    return sha256.digest()


def _targets(dataset: Dataset) -> bytes:
    """Returns the sha256 digest of the integers in `dataset.targets`, as in torchvision; b"" if there are none."""
    try:
        targets = np.asarray(getattr(dataset, "targets", ()))
    except (TypeError, ValueError):
        return b""
    return hashlib.sha256(targets.astype("<i8").tobytes()).digest() if targets.dtype.kind in "iu" else b""


def _common_classes(datasets: Mapping[str, Dataset]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns (classes, class names) of the datasets that have some, or ((), ()). Raises ValueError if these differ."""
    found = {split: classes for split, dataset in datasets.items() if (classes := _classes(split, dataset))[0]}
    first = next(iter(found), "")
    if others := [split for split in found if found[split] != found[first]]:
        mine, wanted = found[others[0]], found[first]
        pairs = chain.from_iterable(map(zip, mine, wanted))
        unlike = next((f", {one!r} instead of {other!r}" for one, other in pairs if one != other), "")
        raise ValueError(
            f"dataset {others[0]!r}: expected the {len(wanted[0]):,} `classes` of {first!r}, found {len(mine[0]):,} "
            f"classes{unlike}: make them the same, or convert each dataset into a set of its own"
        )
    return found.get(first, ((), ()))


def _classes(split: str, dataset: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    classes = getattr(dataset, "classes", ())
    if _is_sequence(classes) and not len(classes):
        return (), ()
    # torchvision's ImageNet has tuples of synonyms as classes, and the synsets' ids as wnids.
    given, ids = (list(v) if _is_sequence(v) else [] for v in (classes, getattr(dataset, "wnids", ())))
    names = tuple(", ".join(name) if isinstance(name, tuple) else name for name in given)
    if not names or not all(isinstance(name, str) for name in (*names, *ids)):
        found = str(classes)[:80]
        raise TypeError(f"dataset {split!r}: expected `classes` to be a sequence of names, found {found!r}")
    classes, class_names = (tuple(ids), names) if len(ids) == len(names) else (names, ())
    if (repeated := first_repeated(classes)) is not None:
        raise ValueError(f"dataset {split!r}: expected distinct classes, found {repeated!r} twice")
    check_text((*classes, *class_names), f"dataset {split!r}: classes")
    return classes, class_names


def _is_sequence(value: object) -> bool:
    return hasattr(type(value), "__len__") and hasattr(type(value), "__getitem__") and not isinstance(value, str)
