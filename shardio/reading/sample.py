"""A sample, and what shows samples to people: captions, and pictures and tables in HTML for notebooks.

Pillow is imported only to draw pictures: reading a set does not need it.
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.errors import shortened

NUM_SHOWN = 24
"""The number of samples on a sheet, unless the caller chooses samples."""
NUM_THUMBNAILS = 6
"""The number of samples that a notebook shows of a set."""
# A notebook shows names, not texts.
_LONGEST = 200
_LONGEST_LABEL = 40


class _Pair(NamedTuple):
    image: NDArray[np.uint8] | Any
    label: int | Any


class Sample(_Pair):
    """A sample of a set. Unpacks to image and label.

    - `image`: a copy, uint8 (height, width, channels); None if the set has no pixels
    - `label`: an int, a float or float32 (K,); None if the split has no labels
    - `arrays`: copies of the values of the split's arrays by name
    - `class_name`: the readable name of the label's class; "" if the label is no class
    """

    arrays: dict[str, NDArray[Any]]
    class_name: str

    def __new__(
        cls,
        image: NDArray[np.uint8] | None,
        label: Any,
        arrays: Mapping[str, NDArray[Any]] | None = None,
        class_name: str = "",
    ) -> Sample:
        self = super().__new__(cls, image, label)
        self.arrays, self.class_name = dict(arrays or {}), class_name
        return self

    def __repr__(self) -> str:
        image = None if self.image is None else f"{self.image.dtype} {self.image.shape}"
        arrays = "".join(f", {name}={value.dtype} {value.shape}" for name, value in self.arrays.items())
        name = f" {self.class_name!r}" if self.class_name else ""
        return f"Sample(image={image}, label={self.label}{name}{arrays})"

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the picture, and a table with label and arrays, in HTML."""
        facts = {} if self.label is None else {"label": f"{self.label} {self.class_name}".rstrip()}
        values = self.arrays if self.image is None else {"image": self.image, **self.arrays}
        facts |= {name: f"{value.dtype} {value.shape}" for name, value in values.items()}
        images = [] if self.image is None else [self.image]
        return pictures_html(images, [self.class_name or f"label {self.label}"] * len(images)) + table_html(facts)


def some_of(count: int, most: int) -> NDArray[np.int64]:
    """Returns at most `most` sample numbers from 0 to `count` - 1, spread evenly."""
    return np.unique(np.linspace(0, count - 1, min(most, count)).astype(np.int64))


def captions_of(shards: Any, numbers: NDArray[np.int64]) -> list[str]:
    """Returns a caption for each sample of a ShardSet or MixedSet: two lines, with number and class or label,
    and the last part of its key."""
    keys = [os.fsdecode(key).rpartition("/")[2] for key in shards.column_of("key", numbers).tolist()]
    labels = [None] * len(numbers) if shards.label_row is None else shards.labels_of(numbers).tolist()
    names = [class_text(label, shards.class_names) for label in labels]
    found = zip(numbers, names, keys, strict=True)
    return [f"{number}: {name}\n{key}" if name else f"{number}\n{key}" for number, name, key in found]


def class_text(label: object, class_names: Sequence[str]) -> str:
    """Returns the readable name of a label's class, the label as text if it is not a class number, or "" for None."""
    if isinstance(label, int) and 0 <= label < len(class_names):
        return class_names[label]
    return "" if label is None else shortened(str(label), _LONGEST_LABEL)


def table_html(facts: Mapping[str, str]) -> str:
    """Returns an HTML table with a row for each name and text of `facts`."""
    rows = (
        f"<tr><th style='text-align:left'>{_text(name)}</th><td>{_text(text)}</td></tr>" for name, text in facts.items()
    )
    return f"<table>{''.join(rows)}</table>"


def pictures_html(pictures: Iterable[NDArray[np.uint8]], captions: Iterable[str]) -> str:
    """Returns HTML with small pictures in a row, each with its caption as a tooltip; "" if Pillow is not installed."""
    try:
        from shardio.drawing.sheet import thumbnail
    except ImportError:
        return ""
    images = (
        f"<img src='{thumbnail(picture)}' alt='{_text(caption)}' title='{_text(caption)}' style='display:inline'>"
        for picture, caption in zip(pictures, captions, strict=True)
    )
    return f"<div>{' '.join(images)}</div>"


def _text(text: str) -> str:
    return html.escape(shortened(text.replace("\n", " "), _LONGEST))
