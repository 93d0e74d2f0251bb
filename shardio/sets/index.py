"""Indexes of a set, read whole and checked: what is known of every sample without a look at its pixels."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.format.layout import HEADER_NBYTES
from shardio.format.manifest import Manifest
from shardio.sets.storage import Storage


def read_index(storage: Storage, manifest: Manifest, split: str) -> NDArray[np.void]:
    """Returns the index of a split, one row per sample, wherever the set lies.

    Raises FormatError if it is not what the manifest says, or a label is of no class; OSError if it cannot be read.
    """
    entry = manifest.splits[split].index
    data = np.empty(entry.nbytes, np.uint8)
    storage.read_into(entry, 0, data.data)
    if (found := hashlib.sha256(data.data).hexdigest()) != entry.sha256:
        raise FormatError(
            f"{storage.path_of(entry)}: sha256: expected {entry.sha256}, found {found}: `shardio verify` tells what "
            "else is damaged, `shardio repair` mends it"
        )
    rows = data[HEADER_NBYTES:].view(entry.dtype)
    check_labels(rows, len(manifest.classes), storage.path_of(entry))
    return rows


def check_labels(rows: NDArray[np.void], num_classes: int, path: object) -> None:
    """Raises FormatError, which names the index `path`, if a label is of no class. A set without classes may have any
    labels."""
    labels = rows["label"]
    if num_classes and not (labels.min() >= 0 and labels.max() < num_classes):
        at = int(np.argmax((labels < 0) | (labels >= num_classes)))
        raise FormatError(f"{path}: label: expected 0 to {num_classes - 1}, found {labels[at]} at sample {at}")
