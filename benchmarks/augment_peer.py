"""Another library's augmentation. augment.py starts this in an environment where shardio need not be installed.

python augment_peer.py torchvision|ffcv SAMPLES.npy COUNT BATCH_SIZE SIZE prints the library's version, and then, for
each line with the name of a way, augments all the samples once and prints how many they were. One thread does it. An
error is a line that begins with an exclamation mark.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Ways = dict[str, Callable[[], Any]]


def import_torchvision() -> Any:
    try:
        import torchvision
    except RuntimeError as error:
        # A wheel for CUDA cannot load its operators beside a torch for the CPU. No transform uses them, but two of
        # them must be known.
        if "torchvision::nms does not exist" not in str(error):
            raise
        known = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            known.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision

        torchvision.declared = known  # keeps the two names known
    return torchvision


def ways_of_torchvision(samples: np.ndarray, batch_size: int, size: int, folder: Path) -> tuple[str, Ways]:
    """Augments uint8 tensors, one by one, and stacked: (C, H, W) contiguous, or channels_last, as the samples lie."""
    torchvision = import_torchvision()
    from torchvision.transforms import v2

    crop = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
    lie = [torch.from_numpy(sample).permute(2, 0, 1) for sample in np.array(samples)]
    layouts = {"contiguous": [image.contiguous() for image in lie], "channels_last": lie}
    outputs = {
        "uint8": v2.Compose(crop),
        "float32": v2.Compose([*crop, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]),
    }

    def augment(transform: Any, images: list[torch.Tensor]) -> None:
        for first in range(0, len(images), batch_size):
            torch.stack([transform(image) for image in images[first : first + batch_size]])

    return torchvision.__version__, {
        f"{output}, {layout}": lambda transform=transform, images=images: augment(transform, images)
        for layout, images in layouts.items()
        for output, transform in outputs.items()
    }


class Indexed:
    """The indexed dataset that FFCV's writer takes."""

    def __init__(self, samples: np.ndarray) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, i: int) -> tuple[np.ndarray]:
        return (np.array(self._samples[i]),)


def ways_of_ffcv(samples: np.ndarray, batch_size: int, size: int, folder: Path) -> tuple[str, Ways]:
    """Runs its loader with one worker: raw pixels from the page cache, OpenCV's filter, which is not antialiased."""
    from importlib.metadata import version

    from ffcv.fields import RGBImageField
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    path = str(folder / "samples.beton")
    writer = DatasetWriter(path, {"image": RGBImageField(write_mode="raw")}, num_workers=1)
    writer.from_indexed_dataset(Indexed(samples))
    normalize = NormalizeImage(255 * np.array(MEAN), 255 * np.array(STD), np.float32)
    loaders = {
        output: Loader(
            path,
            batch_size,
            num_workers=1,
            os_cache=True,
            order=OrderOption.SEQUENTIAL,
            drop_last=False,
            pipelines={
                "image": [
                    RandomResizedCropRGBImageDecoder((size, size)),
                    RandomHorizontalFlip(),
                    *last,
                    ToTensor(),
                    ToTorchImage(),
                ]
            },
        )
        for output, last in {"uint8": [], "float32": [normalize]}.items()
    }
    return version("ffcv"), {name: lambda loader=loader: [None for _ in loader] for name, loader in loaders.items()}


def main() -> None:
    library, path, count, batch_size, size = sys.argv[1:]
    torch.set_num_threads(1)
    samples = np.load(path, mmap_mode="r")[: int(count)]
    # A line that the library prints must not be taken for an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    ways_of = {"torchvision": ways_of_torchvision, "ffcv": ways_of_ffcv}[library]
    with TemporaryDirectory() as folder:
        try:
            version, ways = ways_of(samples, int(batch_size), int(size), Path(folder))
            print("|".join([version, *ways]), file=answers, flush=True)
            for line in sys.stdin:
                ways[line.strip()]()
                print(len(samples), file=answers, flush=True)
        except Exception as error:
            reason = " ".join(str(error).split())
            print(f"!{type(error).__name__}: {reason}", file=answers, flush=True)
            raise


if __name__ == "__main__":
    main()
