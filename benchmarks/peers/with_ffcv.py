"""FFCV: its file of raw pixels, mapped, and copied into batches by compiled threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("ffcv", "numba")


class Indexed:
    def __init__(self, samples: np.ndarray) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return np.array(self.samples[number]), number


def prepare(samples: np.ndarray, out: Path) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    np.save(out / "count.npy", len(samples))
    fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
    DatasetWriter(str(out / "samples.beton"), fields, num_workers=1).from_indexed_dataset(Indexed(samples))


def loader(out: Path, batch_size: int, workers: int, repeats: int) -> Any:
    from ffcv.fields.decoders import IntDecoder, SimpleRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import ToTensor

    batches = Loader(
        str(out / "samples.beton"),
        batch_size,
        num_workers=workers,
        os_cache=True,
        order=OrderOption.RANDOM,
        indices=np.tile(np.arange(np.load(out / "count.npy")), repeats),
        drop_last=False,
        pipelines={"image": [SimpleRGBImageDecoder(), ToTensor()], "label": [IntDecoder(), ToTensor()]},
    )

    def epoch(number: int) -> Iterator[tuple[Any, Any]]:
        for images, labels in batches:
            yield images, labels[:, 0]

    return epoch


WAYS = {"FFCV, raw": loader}
