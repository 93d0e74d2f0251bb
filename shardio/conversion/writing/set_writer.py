"""ShardWriter makes a set from the caller's arrays."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardio.conversion.arrays import ArrayDeclaration, ArraySpec, as_float32, check_specs, check_splits, declare
from shardio.conversion.options import ConvertOptions
from shardio.conversion.sources.names import check_label
from shardio.conversion.writing.shard_file import IndexRows, ShardFileWriter, samples_per_shard
from shardio.errors import ConvertError
from shardio.format.entries import ShardEntry, SplitEntry
from shardio.format.layout import (
    LABEL_ROW,
    LABELS_NAME,
    MANIFEST_NAME,
    MAX_KEY_NBYTES,
    RowType,
    check_sample_shape,
    check_split_name,
    index_name,
    key_field_nbytes,
    pixels_row,
    shard_name,
)
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import check_names_fit, commit_manifest
from shardio.format.parse import check_text, first_repeated
from shardio.sets.given import as_key
from shardio.sets.names import check_local
from shardio.sets.rows import ArrayWriter, write_index
from shardio.system.files import AtomicFile, make_folder, sweep_temporaries
from shardio.version import __version__

# Arguments of `append`, whose names no array can have.
_PARAMETERS = ("self", "image", "label", "split", "key", "source_size")

LabelType = Literal["int64", "float32"] | tuple[Literal["float32"], int] | None


def _label_row(labels: LabelType) -> RowType | None:
    if labels is None:
        return None
    if labels == "int64":
        return LABEL_ROW
    if labels == "float32":
        return RowType("<f4", ())
    if isinstance(labels, tuple) and len(labels) == 2 and labels[0] == "float32":
        return RowType("<f4", (labels[1],))
    raise ValueError(f'labels must be "int64", "float32", ("float32", K) or None; found {labels!r}')


@dataclass
class _OpenSplit:
    arrays: Mapping[str, ArrayWriter]
    shards: list[ShardEntry] = field(default_factory=list)
    rows: IndexRows = field(default_factory=IndexRows)
    writer: ShardFileWriter | None = None


class ShardWriter:
    """Writes your own fixed-shape uint8 arrays as a shard set, published when the `with` block ends.

        with ShardWriter("cifar/", (32, 32, 3), classes=names) as writer:
            for image, label in samples:
                writer.append(image, label)

    - `sample_shape`: (height, width, channels), or None for samples that have `arrays` but no pixels
    - `labels`: "int64"; "float32" for numbers; ("float32", K) for vectors of K numbers; None for no labels
    - `classes`: names of the labels 0, 1, ..., or of the K numbers of a vector. Without names, labels may be any int64.
      `class_names` are readable names of the classes, in the same order
    - `arrays`: the (kind, dtype, shape) of further values of each sample, by name, such as {"embedding": ("array",
      "float16", (768,)), "seg": ("mask", "uint8", (32, 32))}. `append` takes the values by these names
    - `squashed`: images were resized to the set's shape without keeping their aspect ratios, as by `--fit squash`; a
      loader's transforms then treat an image as a picture of its `source_size`

    `out` must be missing or an empty folder. If the block raises, nothing is published or left in `out`. Not thread
    safe.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        sample_shape: tuple[int, int, int] | None,
        *,
        labels: LabelType = "int64",
        classes: Sequence[str] = (),
        class_names: Sequence[str] = (),
        arrays: Mapping[str, ArrayDeclaration] = MappingProxyType({}),
        squashed: bool = False,
        shard_nbytes: int = ConvertOptions.shard_size,
    ) -> None:
        check_local(out, ConvertError, "write into a folder here, and copy the finished set there (docs/cluster.md)")
        self.out = Path(out)
        self.sample_shape = None if sample_shape is None else check_sample_shape(sample_shape)
        self._label_row = _label_row(labels)
        if isinstance(classes, str) or isinstance(class_names, str):
            raise TypeError(
                f"classes and class_names must be lists of names, found {classes!r:.80}, {class_names!r:.80}"
            )
        self.classes = tuple(classes)
        self.class_names = tuple(class_names)
        check_text(self.classes, "classes")
        check_text(self.class_names, "class_names")
        if (repeated := first_repeated(self.classes)) is not None:
            raise ValueError(f"classes must be distinct, found {repeated!r} twice")
        if self.classes and labels not in ("int64", ("float32", len(self.classes))):
            raise ValueError(
                f'classes need labels="int64", or labels=("float32", N) for N classes; found {len(self.classes)} '
                f"classes and labels={labels!r}"
            )
        if self.class_names and len(self.class_names) != len(self.classes):
            raise ValueError(
                f"class_names must have a name for each of the {len(self.classes)} classes; found "
                f"{len(self.class_names)} names"
            )
        self.arrays = self._stored = declare(arrays, self.sample_shape, _PARAMETERS)
        if self._label_row not in (None, LABEL_ROW):
            self._stored += (ArraySpec(LABELS_NAME, "array", self._label_row),)
            check_specs(self._stored)
        if self.sample_shape is None and (squashed or not self.arrays):
            raise ValueError(
                "a set without pixels (sample_shape=None) "
                + ("has no images to squash: leave `squashed` out" if squashed else "needs at least one of `arrays`")
            )
        check_names_fit(self.classes, self.class_names)
        self.squashed = squashed
        self._shard_nbytes = shard_nbytes
        self._row = pixels_row(self.sample_shape or (1, 1, 1))
        self._samples_per_shard = samples_per_shard(shard_nbytes, self._row.nbytes)
        self._splits: dict[str, _OpenSplit] = {}
        self._made = not self.out.exists()
        self._is_done = False
        make_folder(self.out)
        sweep_temporaries(self.out)
        self._manifest = AtomicFile(self.out / MANIFEST_NAME)  # from now on, so no other writer finds an empty folder
        if found := sorted({entry.name for entry in self.out.iterdir()} - {self._manifest.temporary.name}):
            self._manifest.discard()
            raise ConvertError(
                f"{self.out}: expected no folder or an empty folder, found {found[0]!r} in it. A published set never "
                "changes, and has one writer: write to a new folder"
            )

    def append(
        self,
        image: NDArray[np.uint8] | None = None,
        label: ArrayLike | None = None,
        *,
        split: str = "train",
        key: bytes | str = b"",
        source_size: tuple[int, int] | None = None,
        **arrays: object,
    ) -> None:
        """Copies one sample into the set. Leave out the arguments for parts that the set does not have.

        - `image`: uint8 of the set's (height, width, channels)
        - `label`: an integer, a number or K numbers, according to the set's `labels`
        - `key`: a name that says where the sample comes from, by default its number in the split. The length of the
          longest key decides the size of each row of the index
        - `source_size`: the (height, width) of the original image, by default the size of the sample
        - other arguments: the values of the set's arrays, by name, of the declared dtype and shape

        Raises TypeError or ValueError, and adds nothing, if an argument is wrong or the `with` block has ended.
        """
        self._check_not_done()
        if not isinstance(image, type(None) if self.sample_shape is None else np.ndarray):
            wanted = f"a NumPy array, uint8 of {self.sample_shape}"
            expected = "left out, as the set has no pixels" if self.sample_shape is None else wanted
            raise TypeError(f"image must be {expected}, found {type(image).__name__}")
        if image is not None and (image.shape != self.sample_shape or image.dtype != np.uint8):
            raise ValueError(
                f"expected uint8 pixels of shape {self.sample_shape}, found {image.dtype} of shape {image.shape}"
            )
        number = self._check_label(label)
        if not isinstance(key, (str, bytes)):
            raise TypeError(f"key must be str or bytes, found {type(key).__name__}")
        key = as_key(key)
        if len(key) > MAX_KEY_NBYTES:
            raise ValueError(f"key must have at most {MAX_KEY_NBYTES} bytes, found {len(key)} bytes")
        if key.endswith(b"\0"):
            raise ValueError(f"key must not end in a NUL byte, which NumPy's S type drops; found {key[-80:]!r}")
        source_size = (self.sample_shape or (0, 0))[:2] if source_size is None else source_size
        least = 1 if self.squashed else 0
        numbers = source_size if isinstance(source_size, (Sequence, np.ndarray)) else ()
        if len(numbers) != 2 or not all(isinstance(n, Integral) and least <= n < 1 << 32 for n in numbers):
            expected = f"(height, width), each an integer from {least} to 2**32 - 1"
            raise ValueError(f"source_size must be {expected}, found {source_size!r}")
        if arrays.keys() != {spec.name for spec in self.arrays}:
            expected = ", ".join(spec.name for spec in self.arrays) or "none"
            found = ", ".join(arrays) or "none"
            raise TypeError(f"expected values of the arrays of the set ({expected}), found {found}")
        if len(self._stored) > len(self.arrays):
            arrays[LABELS_NAME] = as_float32(label)
        values = {spec.name: spec.check(arrays[spec.name]) for spec in self._stored}
        if split not in self._splits:
            check_split_name(split)
            check_splits((*self._splits, split), self._stored)
            writers = (
                ArrayWriter(self.out, split, spec.name, spec.kind, spec.row, self._shard_nbytes)
                for spec in self._stored
            )
            self._splits[split] = _OpenSplit({writer.name: writer for writer in writers})
        state = self._splits[split]
        key = key or str(len(state.rows)).encode()
        checksum = 0
        if image is not None:
            if state.writer is None:
                state.writer = ShardFileWriter(self.out / shard_name(split, len(state.shards)), self._row)
            checksum = state.writer.append(image)
        state.rows.append(label=number, key=key, source_size=source_size, crc32=checksum)
        for name, array in state.arrays.items():
            array.append(values[name][np.newaxis])
        if len(state.rows) % self._samples_per_shard == 0:
            self._finish_shard(state)

    def _check_label(self, label: Any) -> int | None:
        """Returns the label as an int for the index; None if the index has no labels."""
        if self._label_row is None and label is not None:
            raise TypeError(f"label must be left out, as the set has no labels (labels=None); found {label!r:.80}")
        if self._label_row != LABEL_ROW:
            return None
        number = check_label(label)
        if self.classes and not 0 <= number < len(self.classes):
            raise ValueError(f"label must be from 0 to {len(self.classes) - 1}, found {number}")
        if not -(1 << 63) <= number < 1 << 63:
            raise ValueError(f"label must fit in int64, found {number}")
        return number

    def _finish_shard(self, state: _OpenSplit) -> None:
        writer, state.writer = state.writer, None
        if writer is not None:
            with writer:
                state.shards.append(writer.finish())

    def _check_not_done(self) -> None:
        if self._is_done:
            raise ValueError(
                f"{self.out}: expected no call after the end of the `with` block, which published the set or discarded "
                "it: append all samples inside of it, or write another set to a new folder"
            )

    def __enter__(self) -> ShardWriter:
        self._check_not_done()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_done = True
        try:
            if kind is None:
                self._publish()
        finally:
            self._discard()  # nothing, if the set was published

    def _publish(self) -> None:
        splits, has_label = {}, self._label_row == LABEL_ROW
        for name, state in self._splits.items():
            self._finish_shard(state)
            if len(state.rows):
                key_nbytes = key_field_nbytes(max(len(key) for _, key, *_ in state.rows.values))
                index = write_index(self.out, name, state.rows.to_array(key_nbytes, has_label=has_label))
                arrays = {name: array.finish() for name, array in state.arrays.items()}
                shards = tuple(state.shards)
                splits[name] = SplitEntry(len(state.rows), index, shards, arrays=arrays, squashed=self.squashed)
        if not splits:
            raise ConvertError(f"{self.out}: expected at least one sample, found none, so nothing is published")
        manifest = Manifest(self.sample_shape, self.classes, splits, None, {"shardio": __version__}, self.class_names)
        commit_manifest(self.out, manifest, self._manifest)

    def _discard(self) -> None:
        """Removes the files that this writer wrote, unless the set was published already."""
        self._manifest.discard()
        if (self.out / MANIFEST_NAME).exists():
            return
        for name, state in self._splits.items():
            if state.writer is not None:
                state.writer.__exit__(None, None, None)
            # The last of them may have been published by a call that then failed.
            for number in range(len(state.shards) + 1):
                (self.out / shard_name(name, number)).unlink(missing_ok=True)
            for array in state.arrays.values():
                array.discard()
            (self.out / index_name(name)).unlink(missing_ok=True)
        if self._made:
            with contextlib.suppress(OSError):  # another process may have put something there
                self.out.rmdir()
