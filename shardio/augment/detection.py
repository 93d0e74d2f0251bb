"""What detectors are trained with: crops chosen by boxes, zooming out, and photometric distortion.

Liu, Anguelov, Erhan, Szegedy, Reed, Fu, Berg, "SSD: Single shot multibox detector", ECCV 2016, as in torchvision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.augment.batch import Batch
from shardio.augment.boxes import MOST_DRAWS, Boxes, between
from shardio.augment.chain import Transform
from shardio.augment.checks import Fill, Probability, check_number, check_range, fill_of, positive_range, whole
from shardio.augment.colour import ColorJitter
from shardio.augment.resample import to_device
from shardio.augment.steps import Op

Floats = NDArray[np.float64]

_OPTIONS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
# The random numbers of a trial, and the number of trials that are made at once.
_NUMBERS = 4
_AT_ONCE = MOST_DRAWS // _NUMBERS


@dataclass(frozen=True, repr=False)
class RandomIoUCrop(Transform):
    """Crops a part of the image that overlaps with a box by a random minimum IoU.

    - The minimum is one of `sampler_options`; with 1 or more, the image stays as it is.
    - `trials` parts are tried, then another minimum. A part's sides are a share of the image's sides, from `min_scale`
      to `max_scale`, and their ratio is between `min_aspect_ratio` and `max_aspect_ratio`.
    - Boxes whose centers are outside of the part are removed. Images without boxes stay as they are.

    Images have several sizes then: put a Resize((height, width)) after it.
    """

    min_scale: Probability = 0.3
    max_scale: Probability = 1.0
    min_aspect_ratio: float = 0.5
    max_aspect_ratio: float = 2.0
    sampler_options: Sequence[float] | None = None
    trials: Annotated[int, whole(1)] = 40

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("min_scale and max_scale", (self.min_scale, self.max_scale), 0, 1, above=True)
        check_range("min_aspect_ratio and max_aspect_ratio", (self.min_aspect_ratio, self.max_aspect_ratio), 0)
        for option in self._options:
            check_number("sampler_options", option)
        if not any(option >= 1 for option in self._options):
            raise ValueError(f"sampler_options must have a number of at least 1, to end; found {self.sampler_options}")

    @property
    def _options(self) -> tuple[float, ...]:
        return _OPTIONS if self.sampler_options is None else tuple(self.sampler_options)

    def apply(self, batch: Batch, purpose: str) -> Batch:
        batch.check_uint8()
        batch = batch.made() if batch.steps else batch
        if batch.targets is None or not batch.targets.boxes:
            raise ValueError("RandomIoUCrop needs boxes; found none: give boxes=, or name an array of boxes by arrays=")
        known = _boxes_of(batch)
        heights, widths = batch.sizes.T.astype(float)
        crops = np.stack([np.zeros(len(batch)), np.zeros(len(batch)), widths, heights])
        left = np.flatnonzero((known[:, :, 4] >= 0).any(axis=1))
        kept = np.ones(known.shape[:2], bool)
        round_number = 0
        while len(left):
            least = np.array(self._options)[
                (batch.draws.of(left).uniform(f"{purpose} {round_number}", 1)[0] * len(self._options)).astype(np.int64)
            ]
            left, least = left[least < 1], least[least < 1]
            for first in range(0, self.trials, _AT_ONCE):
                if not len(left):
                    break
                count = min(_AT_ONCE, self.trials - first)
                numbers = batch.draws.of(left).uniform(f"{purpose} {round_number}.{first}", _NUMBERS * count)
                found, inside = self._parts(numbers.reshape(count, _NUMBERS, -1), batch.sizes[left], known[left], least)
                good, chosen = inside.any(axis=(0, 2)), inside.any(axis=2).argmax(axis=0)
                rows = left[good]
                crops[:, rows] = found[chosen, :, np.arange(len(left))][good].T
                kept[rows] = inside[chosen, np.arange(len(left))][good]
                left, least = left[~good], least[~good]
            round_number += 1
        names, ends = list(batch.targets.boxes), np.cumsum([some.shape[1] for some in batch.targets.boxes.values()])
        targets = batch.targets.keeping(dict(zip(names, np.split(kept, ends[:-1], axis=1), strict=True)))
        boxes = Boxes(crops[1], crops[0], crops[3] - crops[1], crops[2] - crops[0])
        return replace(batch, targets=targets).cropped(boxes)

    def _parts(
        self, numbers: Floats, sizes: NDArray[np.int64], boxes: Floats, least: Floats
    ) -> tuple[Floats, NDArray[np.bool_]]:
        """Returns the parts of each trial, (T, 4, B), and which boxes are inside, (T, B, K).

        No box is inside of a part that must not be taken. `numbers`, (T, 4, B), are random numbers from [0, 1), and
        `boxes`, (B, K, 5), are in pixels.
        """
        scales = between((self.min_scale, self.max_scale), numbers[:, :2])
        width, height = np.floor(sizes[:, 1] * scales[:, 0]), np.floor(sizes[:, 0] * scales[:, 1])
        left = np.floor((sizes[:, 1] - width) * numbers[:, 2])
        top = np.floor((sizes[:, 0] - height) * numbers[:, 3])
        right, bottom = left + width, top + height
        with np.errstate(divide="ignore", invalid="ignore"):
            aspect = width / height
            fits = (aspect >= self.min_aspect_ratio) & (aspect <= self.max_aspect_ratio) & (width > 0) & (height > 0)
        x0, y0, x1, y1, label = boxes.transpose(2, 0, 1)
        sides = [side[:, :, None] for side in (left, top, right, bottom)]
        x, y = (x0 + x1) / 2, (y0 + y1) / 2
        inside = (sides[0] < x) & (x < sides[2]) & (sides[1] < y) & (y < sides[3]) & (label >= 0) & fits[:, :, None]
        across = np.minimum(x1, sides[2]) - np.maximum(x0, sides[0])
        down = np.minimum(y1, sides[3]) - np.maximum(y0, sides[1])
        common = across.clip(min=0) * down.clip(min=0)
        whole = (x1 - x0) * (y1 - y0) + (width * height)[:, :, None] - common
        overlap = np.where(inside, common / np.maximum(whole, 1e-12), -1.0).max(axis=2)
        return np.stack([left, top, right, bottom], axis=1), inside & (overlap >= least)[:, :, None]


def _boxes_of(batch: Batch) -> Floats:
    """Returns the boxes of all names, (B, K, 5), in pixels of the images after the recorded changes."""
    assert batch.targets is not None
    stored = torch.cat(list(batch.targets.boxes.values()), dim=1).double().cpu().numpy()
    region, (heights, widths) = batch.region, batch.sizes.T
    x = (stored[:, :, 0:4:2] - region.lefts[:, None, None]) * (widths / region.widths)[:, None, None]
    y = (stored[:, :, 1:4:2] - region.tops[:, None, None]) * (heights / region.heights)[:, None, None]
    x = np.where(batch.is_mirrored[:, None, None], widths[:, None, None] - x[:, :, ::-1], x)
    inside_x, inside_y = x.clip(0, widths[:, None, None]), y.clip(0, heights[:, None, None])
    seen = (inside_x[..., 0] < inside_x[..., 1]) & (inside_y[..., 0] < inside_y[..., 1])
    label = np.where(seen, stored[:, :, 4], -1)
    return np.stack([inside_x[..., 0], inside_y[..., 0], inside_x[..., 1], inside_y[..., 1], label], axis=2)


@dataclass(frozen=True, repr=False)
class RandomZoomOut(Transform):
    """Places the image on a larger canvas of the color `fill`, with probability `p`.

    The canvas is as many times as high and wide as a random number from `side_range`. Images have several sizes then:
    put a Resize((height, width)) after it.
    """

    fill: Fill = 0
    side_range: Annotated[tuple[float, float], positive_range()] = (1.0, 4.0)
    p: Probability = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("side_range", self.side_range, 1)

    def apply(self, batch: Batch, purpose: str) -> Batch:
        batch.check_uint8()
        batch = batch.made() if batch.boxes is not None or batch.steps else batch
        wanted, factor, *places = batch.draws.uniform(purpose, 4)
        factor = np.where(wanted < self.p, between(self.side_range, factor), 1.0)
        # Sizes and places in pixels of the images before they were squashed.
        canvas = np.floor(batch.sizes * factor[:, None])
        firsts = np.floor((canvas - batch.sizes) * np.stack(places[::-1], axis=1))
        if batch.boxes is None:
            scales = np.array(batch.images.shape[2:]) / batch.sizes
            batch = replace(batch, boxes=batch.region, within=batch.region)
        else:
            scales = np.ones_like(firsts)
        stored = np.stack([batch.region.heights, batch.region.widths], axis=1)
        before = np.ceil(firsts * scales)
        size = np.ceil(before + stored + (canvas - batch.sizes - firsts) * scales).max(axis=0).astype(int).tolist()
        fill = fill_of(self.fill or 0, batch.images.shape[1])
        own = replace(batch, sizes=stored.astype(np.int64))
        placed = own.placed((size[0], size[1]), -before.astype(np.int64), fill=fill)
        tops, lefts = (before - firsts * scales).T
        boxes = Boxes(tops, lefts, *(canvas * scales).T)
        return replace(placed, boxes=boxes, within=boxes, sizes=canvas.astype(np.int64))


@dataclass(frozen=True, repr=False)
class RandomPhotometricDistort(Transform):
    """Changes brightness, contrast, saturation and hue, and exchanges the channels, each with probability `p`.

    The bounds of the factors, and of the share of the color circle, are as in ColorJitter. Contrast comes first or
    last, each as often.
    """

    brightness: tuple[float, float] = (0.875, 1.125)
    contrast: tuple[float, float] = (0.5, 1.5)
    saturation: tuple[float, float] = (0.5, 1.5)
    hue: tuple[float, float] = (-0.05, 0.05)
    p: Probability = 0.5
    keeps_places = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._bounds()

    def _bounds(self) -> list[tuple[float, float]]:
        jitter = ColorJitter(self.brightness, self.contrast, self.saturation, self.hue)
        return [jitter.bounds(name) for name in ColorJitter.OPS]

    def apply(self, batch: Batch, purpose: str) -> Batch:
        channels = batch.images.shape[1]
        numbers = batch.draws.uniform(purpose, 10)
        orders = batch.draws.uniform(f"{purpose} channels", channels).argsort(axis=0).T
        values = [between(bounds, share) for bounds, share in zip(self._bounds(), numbers[:4], strict=True)]
        brightness, contrast, saturation, hue, exchanged = numbers[4:9] < self.p
        first = numbers[9] < 0.5
        batch = batch.stepped(Op.BRIGHTNESS, values[0], where=brightness)
        batch = batch.stepped(Op.CONTRAST, values[1], where=contrast & first)
        batch = batch.stepped(Op.SATURATION, values[2], where=saturation)
        batch = batch.stepped(Op.HUE, values[3], where=hue)
        batch = batch.stepped(Op.CONTRAST, values[1], where=contrast & ~first).finished()
        orders = np.where(exchanged[:, None], orders, np.arange(channels))
        index = to_device(torch.from_numpy(orders), batch.images.device)
        images = batch.images.gather(1, index[:, :, None, None].expand_as(batch.images))
        return replace(batch, images=images.contiguous(memory_format=torch.channels_last))
