"""SPDL: each epoch decodes and resizes again, in threads of one process, by FFmpeg, which crops and flips, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import spdl.io
import torch
from spdl.pipeline import PipelineBuilder

PACKAGES = ("spdl", "spdl_io", "torch")
MEAN, STD = (torch.tensor(x).view(3, 1, 1) * 255 for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
EVALUATED = "scale=256:256:force_original_aspect_ratio=increase:flags=bilinear,crop=224:224,format=rgb24"
BUFFERED = 3


def prepare(images: Path, out: Path) -> None:
    (out / "images").symlink_to(images.resolve())


def paths(out: Path) -> list[tuple[str, int]]:
    folders = sorted(folder for folder in (out / "images").iterdir() if folder.is_dir())
    return [(str(file), label) for label, folder in enumerate(folders) for file in sorted(folder.iterdir())]


def cropped(packets: Any, rng: Random) -> str:
    """Returns FFmpeg's filter for a random crop, as torchvision draws it, and a flip."""
    width, height = packets.width, packets.height
    for _ in range(10):
        area, ratio = width * height * rng.uniform(0.08, 1), np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            break
    else:
        w = h = min(width, height)
    place = f"crop={w}:{h}:{rng.randint(0, width - w)}:{rng.randint(0, height - h)}:exact=1"
    flip = "hflip," if rng.random() < 0.5 else ""
    return f"{place},scale=224:224:flags=bilinear,{flip}format=rgb24"


def decoded(rng: Random | None, source: tuple[str, int]) -> tuple[Any, int]:
    packets = spdl.io.demux_image(source[0])
    chosen = EVALUATED if rng is None else cropped(packets, rng)
    return spdl.io.decode_packets(packets, filter_desc=chosen), source[1]


def stacked(decoded: list[tuple[Any, int]]) -> tuple[Any, Any]:
    pixels = spdl.io.to_torch(spdl.io.convert_frames([frames for frames, _ in decoded]))
    return pixels.permute(0, 3, 1, 2), torch.tensor([label for _, label in decoded])


def normalized(batch: tuple[Any, Any]) -> tuple[Any, Any]:
    return batch[0].float().sub_(MEAN).div_(STD), batch[1]


def evaluated(out: Path, count: int) -> np.ndarray:
    """Returns the first pictures of an evaluation, float32 (count, 3, 224, 224) from 0 to 1."""
    pixels, _ = stacked([decoded(None, source) for source in paths(out)[:count]])
    return (pixels.float() / 255).numpy()


def opened(augmented: bool, *stages: Callable[[Any], Any]) -> Callable[[Path, int, int, int], Any]:
    def way(out: Path, batch_size: int, workers: int, repeats: int) -> Any:
        sources = paths(out)
        torch.set_num_threads(1)

        def shuffled(rng: Random) -> Iterator[tuple[str, int]]:
            for _ in range(repeats):
                yield from rng.sample(sources, len(sources))

        def epoch(number: int) -> Iterator[tuple[Any, Any]]:
            rng = Random(number)
            builder = PipelineBuilder().add_source(shuffled(rng))
            builder.pipe(partial(decoded, rng if augmented else None), concurrency=workers).aggregate(batch_size)
            for stage in stages:
                builder.pipe(stage)
            pipeline = builder.add_sink(BUFFERED).build(num_threads=workers)
            with pipeline.auto_stop():
                for batch in pipeline:
                    yield batch if stages else ([frames for frames, _ in batch], [label for _, label in batch])

        return epoch

    return way


WAYS = {
    "SPDL: crop, flip, normalize": opened(True, stacked, normalized),
    "SPDL: evaluation": opened(False, stacked, normalized),
    "SPDL: evaluation, not normalized": opened(False, stacked),
    "SPDL: decode and resize alone": opened(False),
}
