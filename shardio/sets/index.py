"""Indexes of a set, read whole and checked: what is known of every sample without a look at its pixels."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.format.entries import FileEntry
from shardio.format.layout import HEADER_NBYTES
from shardio.format.manifest import Manifest
from shardio.sets.storage import Storage


def read_index(storage: Storage, manifest: Manifest, split: str) -> NDArray[np.void]:
    """Returns the index of a split, one row per sample, wherever the set lies.

    Raises FormatError if it is not what the manifest says, or a label is of no class; OSError if it cannot be read.
    """
    entry = manifest.splits[split].index
    rows = _read_checked(storage, entry)[HEADER_NBYTES:].view(entry.dtype)
    check_labels(rows, len(manifest.classes), storage.path_of(entry))
    return rows


def check_labels(rows: NDArray[np.void], num_classes: int, path: object) -> None:
    """Raises FormatError, which names the index `path`, if a label is of no class. A set without classes may have any
    labels."""
    labels = rows["label"]
    if num_classes and not (labels.min() >= 0 and labels.max() < num_classes):
        at = int(np.argmax((labels < 0) | (labels >= num_classes)))
        raise FormatError(f"{path}: label: expected 0 to {num_classes - 1}, found {labels[at]} at sample {at}")


def read_order(storage: Storage, manifest: Manifest, split: str) -> NDArray[np.int64]:
    """Returns for each sample of a split the stored row of its pixels. Errors are those of `read_index`."""
    content = manifest.splits[split]
    if content.order is None:
        return np.arange(content.num_samples)
    entry = content.orders[content.order]
    order = _read_checked(storage, entry)[HEADER_NBYTES:].view(np.int64)
    if not (order.min() >= 0 and order.max() < content.num_rows):
        raise FormatError(
            f"{storage.path_of(entry)}: expected stored rows from 0 to {content.num_rows - 1}, found {order.min()} to "
            f"{order.max()}"
        )
    return order


def _read_checked(storage: Storage, entry: FileEntry) -> NDArray[np.uint8]:
    """Returns all bytes of a file. Raises FormatError if they are not what the manifest says."""
    data = np.empty(entry.nbytes, np.uint8)
    storage.read_into(entry, 0, data.data)
    if (found := hashlib.sha256(data.data).hexdigest()) != entry.sha256:
        raise FormatError(
            f"{storage.path_of(entry)}: sha256: expected {entry.sha256}, found {found}: `shardio verify` says what "
            "else is damaged, and how to repair it"
        )
    return data
