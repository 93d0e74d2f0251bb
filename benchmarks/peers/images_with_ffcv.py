"""FFCV: a file of raw pixels, 256 x 256, cropped, resized without antialiasing, and normalized by compiled code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pictures import Indexed

PACKAGES = ("ffcv", "numba")
MEAN, STD = (np.array(x) * 255 for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def prepare(images: Path, out: Path) -> None:
    write(images, out, workers=2)


def write(images: Path, out: Path, workers: int) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    pictures: Any = Indexed(images)
    np.save(out / "count.npy", len(pictures))
    fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
    DatasetWriter(str(out / "samples.beton"), fields, num_workers=workers).from_indexed_dataset(pictures)


def loader(out: Path, batch_size: int, workers: int, repeats: int, random: bool) -> Any:
    from ffcv.fields.decoders import (
        CenterCropRGBImageDecoder,
        IntDecoder,
        RandomResizedCropRGBImageDecoder,
    )
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage

    if random:
        image = [RandomResizedCropRGBImageDecoder((224, 224)), RandomHorizontalFlip()]
    else:
        image = [CenterCropRGBImageDecoder((224, 224), ratio=224 / 256)]
    image += [NormalizeImage(MEAN, STD, np.float32), ToTensor(), ToTorchImage(convert_back_int16=False)]
    return Loader(
        str(out / "samples.beton"),
        batch_size,
        num_workers=workers,
        os_cache=True,
        order=OrderOption.RANDOM if random else OrderOption.SEQUENTIAL,
        indices=np.tile(np.arange(np.load(out / "count.npy")), repeats),
        drop_last=False,
        pipelines={"image": image, "label": [IntDecoder(), ToTensor()]},
    )


def evaluated(out: Path, count: int) -> np.ndarray:
    """Returns the first pictures of an evaluation, float32 (count, 3, 224, 224) from 0 to 1."""
    images, _ = next(iter(loader(out, count, 1, 1, random=False)))
    mean, std = (x.reshape(3, 1, 1) / 255 for x in (MEAN, STD))
    return np.array(images * std + mean, np.float32)


def way(out: Path, batch_size: int, workers: int, repeats: int) -> Any:
    batches = loader(out, batch_size, workers, repeats, random=True)

    def epoch(number: int) -> Iterator[tuple[Any, Any]]:
        for images, labels in batches:
            yield images, labels[:, 0]

    return epoch


WAYS = {"FFCV, raw: crop, flip, normalize": way}
