"""datago: each epoch decodes and resizes again, in threads of one process, written in Rust.

It cuts a square and resizes it, 256 x 256 here, of which the central 224 x 224 is taken; it has no random crops.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datago import DatagoClient, initialize_logging
from pictures import SIDE, sources

PACKAGES = ("datago", "torch")
MEAN, STD = (torch.tensor(x).view(3, 1, 1) * 255 for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
BUFFERED = 128
MARGIN = (SIDE - 224) // 2
Sample = tuple[np.ndarray, str]


def prepare(images: Path, out: Path) -> None:
    (out / "images").symlink_to(images.resolve())


def samples(images: Path, workers: int, repeats: int) -> Iterator[Sample]:
    """Yields the pixels (224, 224, 3) uint8 and the path of each image, in another order in each pass."""
    os.environ["DATAGO_MAX_TASKS"] = str(workers)
    initialize_logging("error")
    square = {"default_image_size": SIDE, "downsampling_ratio": 32, "min_aspect_ratio": 1.0, "max_aspect_ratio": 1.0}
    config = {
        "source_type": "file",
        "source_config": {"root_path": str(images), "random_sampling": True, "rank": 0, "world_size": 1},
        "image_config": {"crop_and_resize": True, "image_to_rgb8": True, "pre_encode_images": False, **square},
        "limit": 1 << 30,
        "prefetch_buffer_size": BUFFERED,
        "samples_buffer_size": BUFFERED,
    }
    client = DatagoClient(json.dumps(config))
    for _ in range(repeats):
        client.start()
        while (sample := client.get_sample()) is not None:
            pixels = sample.image.to_numpy_array()[MARGIN : MARGIN + 224, MARGIN : MARGIN + 224]
            yield pixels, json.loads(sample.id)
    client.stop()


def stacked(batch: list[Sample], labels: dict[str, int]) -> tuple[Any, Any]:
    pixels = torch.from_numpy(np.stack([pixels for pixels, _ in batch])).permute(0, 3, 1, 2)
    return pixels, torch.tensor([labels[path] for _, path in batch])


def normalized(batch: list[Sample], labels: dict[str, int]) -> tuple[Any, Any]:
    pixels, numbers = stacked(batch, labels)
    return pixels.float().sub_(MEAN).div_(STD), numbers


def alone(batch: list[Sample], labels: dict[str, int]) -> tuple[Any, Any]:
    return [pixels for pixels, _ in batch], [labels[path] for _, path in batch]


def evaluated(out: Path, count: int) -> np.ndarray:
    """Returns the first pictures of an evaluation, float32 (count, 3, 224, 224) from 0 to 1."""
    images = (out / "images").resolve()
    found = {path: pixels for pixels, path in samples(images, 2, 1)}
    pixels = np.stack([found[str(file)] for file, _ in sources(images)[:count]])
    return pixels.transpose(0, 3, 1, 2).astype(np.float32) / 255


def opened(made: Callable[[list[Sample], dict[str, int]], Any]) -> Callable[[Path, int, int, int], Any]:
    def way(out: Path, batch_size: int, workers: int, repeats: int) -> Any:
        images = (out / "images").resolve()
        labels = {str(file): label for file, label in sources(images)}
        torch.set_num_threads(1)

        def epoch(number: int) -> Iterator[tuple[Any, Any]]:
            batch: list[Sample] = []
            for sample in samples(images, workers, repeats):
                batch.append(sample)
                if len(batch) == batch_size:
                    yield made(batch, labels)
                    batch = []

        return epoch

    return way


WAYS = {
    "datago: evaluation": opened(normalized),
    "datago: evaluation, not normalized": opened(stacked),
    "datago: decode and resize alone": opened(alone),
}
