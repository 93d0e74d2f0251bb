"""Pictures and pixels made on the spot. Tests of a GPU need no simplejpeg."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, features

HAS_AVIF = "avif" in features.modules and features.check("avif")
needs_avif = pytest.mark.skipif(not HAS_AVIF, reason="needs a Pillow with AVIF")


def random_picture(rng: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    """Returns a picture smooth enough for JPEG to keep, in which every block of pixels is different."""
    coarse = rng.integers(0, 256, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
    return np.ascontiguousarray(np.kron(coarse, np.ones((8, 8, 1), np.uint8))[:height, :width])


def random_pictures(rng: np.random.Generator, count: int, height: int, width: int) -> NDArray[np.uint8]:
    return np.stack([random_picture(rng, height, width) for _ in range(count)])


def write_jpeg(path: Path, pixels: NDArray[np.uint8], quality: int = 90) -> None:
    import simplejpeg

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(simplejpeg.encode_jpeg(pixels, quality=quality))


def random_jpeg(seed: int, height: int, width: int) -> bytes:
    import simplejpeg

    data: bytes = simplejpeg.encode_jpeg(random_picture(np.random.default_rng(seed), height, width))
    return data


def encode(image: Image.Image | NDArray[Any], kind: str, **options: Any) -> bytes:
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def sample_pixels(i: int, shape: tuple[int, int, int] = (6, 5, 3)) -> NDArray[np.uint8]:
    """Returns the pixels of sample i of a set of `make_set`: every sample is different, and known."""
    return np.random.default_rng(i).integers(0, 256, shape, dtype=np.uint8)


def as_batch(images: NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2)


def sample_images(count: int, shape: tuple[int, int, int] = (6, 5, 3)) -> torch.Tensor:
    """The first samples of a set of `make_set`, as a loader's batch has them."""
    return as_batch(np.stack([sample_pixels(i, shape) for i in range(count)]))


def psnr(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> float:
    error = np.mean((a.astype(float) - b) ** 2)
    return float(10 * np.log10(255**2 / error)) if error else math.inf
