"""Mixup and CutMix: mix each image of a batch with another image, and their labels.

Zhang, Cisse, Dauphin, Lopez-Paz, "mixup: Beyond empirical risk minimization", ICLR 2018; Yun, Han, Oh, Chun, Choe, Yoo,
"CutMix: Regularization strategy to train strong classifiers with localizable features", ICCV 2019. By default they
match torchvision's classes of the same names; with `per_sample` and partner="flip" they match timm's mode "elem".
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardio.augment.arguments import LATER, Probability, check_number, check_range, check_whole
from shardio.augment.batch import Batch, check_no_masks
from shardio.augment.chain import Transform
from shardio.augment.erasing import are_inside
from shardio.augment.resample import to_device

Partner = Literal["roll", "flip"]
Shares = Annotated[tuple[float, float], partial(check_range, low=0, high=1)]
Floats = NDArray[np.float64]


def beta_quantiles(alpha: float, uniform: Floats) -> Floats:
    """Returns random numbers from Beta(alpha, alpha) for `uniform`, random numbers from [0, 1) of any shape."""
    logits, shares = _beta_table(alpha)
    values: Floats = 1 / (1 + np.exp(-np.interp(uniform, shares, logits)))
    return values


@lru_cache(16)
def _beta_table(alpha: float) -> tuple[Floats, Floats]:
    """Returns 65,536 equally spaced values of log(x / (1 - x)), and the share of Beta(alpha, alpha) below each of them.

    The density over log(x / (1 - x)) is proportional to (x (1 - x)) ** alpha. It is smooth and falls exponentially on
    both sides, so sums over equal steps are almost exact.
    """
    # Beyond that, shares are 0 or 1 to all digits.
    most = min(40 / alpha + 5, 700.0)
    logits = np.linspace(-most, most, 1 << 16)
    # log(x) and log(1 - x), without the cancellation.
    falling = np.log1p(np.exp(-np.abs(logits)))
    density = np.exp(alpha * (np.minimum(logits, 0) - falling) - alpha * (np.maximum(logits, 0) + falling))
    shares = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return logits, shares / shares[-1]


@dataclass(frozen=True, repr=False)
class _Mix(Transform):
    """Mixes each image with its partner: the base class of Mixup and CutMix."""

    num_classes: Annotated[int, partial(check_whole, low=1)] | None = None
    alpha: Annotated[float, check_number] = 1.0
    p: Probability = 1.0
    per_sample: bool = False
    partner: Partner = "roll"
    label_smoothing: Annotated[float, partial(check_number, low=0)] = 0.0
    on_any_device = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing >= 1:
            raise ValueError(f"label_smoothing must be less than 1; found {self.label_smoothing}")
        if self.alpha <= 0:
            raise ValueError(f"alpha must be above 0; found {self.alpha}")

    def apply(self, batch: Batch, purpose: str) -> Batch:
        check_no_masks(batch.masks.by_name if batch.masks else ())
        targets = self._targets_of(batch.labels)
        batch = batch.finished()
        drawn = (batch.draws if self.per_sample else batch.draws.of_the_batch()).uniform(purpose, 6)
        shares = np.where(drawn[0] < self.p, beta_quantiles(self.alpha, drawn[1]), 1.0)
        images, kept = self._mixed(batch.images, self._partners(batch.images), shares, drawn[2:])
        share = _column(kept, targets)
        mixed = targets * share + self._partners(targets) * (1 - share)
        return replace(batch, images=images, labels=mixed)

    @property
    def mixed_classes(self) -> frozenset[int | None]:
        return frozenset([self.num_classes])

    @abstractmethod
    def _mixed(self, images: Tensor, others: Tensor, shares: Floats, places: Floats) -> tuple[Tensor, Tensor]:
        """Returns the images mixed with `others`, their partners, and the share that is kept of each image, (B,).

        `shares`, (B,), are the drawn shares to keep. `places`, (4, B), from [0, 1), draw where a window of CutMix is.
        """

    def _partners(self, tensor: Tensor) -> Tensor:
        # roll() would give up channels_last memory on CUDA.
        return torch.cat([tensor[-1:], tensor[:-1]]) if self.partner == "roll" else tensor.flip(0)

    def _targets_of(self, labels: Tensor | None) -> Tensor:
        """Returns labels that can be mixed: int64 labels as float32 (B, num_classes), float labels unchanged."""
        if labels is None:
            raise ValueError("Mixup and CutMix need labels; found none: pass labels, or load a set that has labels")
        if labels.dtype == torch.int64:
            if self.num_classes is None:
                raise ValueError("Mixup and CutMix need num_classes for int64 labels; found num_classes=None")
            shape, share = (len(labels), self.num_classes), self.label_smoothing / self.num_classes
            targets = torch.full(shape, share, dtype=torch.float32, device=labels.device)
            own = torch.full_like(targets[:, :1], 1 - self.label_smoothing)
            return targets.scatter_add_(1, labels[:, None], own)
        if self.label_smoothing or self.num_classes is not None:
            raise ValueError(
                f"Mixup and CutMix: num_classes and label_smoothing need int64 labels (B,); found {labels.dtype} "
                f"{tuple(labels.shape)}: leave out both arguments; or, if the labels were mixed before, mix once"
            )
        return labels


@dataclass(frozen=True, repr=False)
class Mixup(_Mix):
    """Blends each image, and its label, with another image of the batch, with probability `p`.

    - Images must have a floating point type: put Mixup after Normalize.
    - The weight is drawn from Beta(alpha, alpha): once per batch, by the batch's first sample; with `per_sample`, for
      each sample.
    - `partner`: "roll" mixes with the previous image of the batch, "flip" with the image at the same distance from the
      other end.
    - Labels that are class numbers, int64 (B,), become float32 (B, num_classes). `label_smoothing` is the share spread
      over all classes. For float32 labels, (B,) or (B, K), leave out `num_classes` and `label_smoothing`.
    """

    def _mixed(self, images: Tensor, others: Tensor, shares: Floats, places: Floats) -> tuple[Tensor, Tensor]:
        if not images.dtype.is_floating_point:
            raise ValueError(
                f"Mixup needs images of a floating point type; found {images.dtype}: put Mixup after Normalize"
            )
        kept = _on_device(shares, images)
        # In float32: shares of 8 bits would differ from the shares of the labels.
        mixed = torch.lerp(others.float(), images.float(), _column(kept, images))
        return mixed.to(images.dtype), kept


@dataclass(frozen=True, repr=False)
class CutMix(_Mix):
    """Replaces a window of each image by the pixels of another image, with probability `p`.

    The window's share of the image is also the share of the label that is replaced. A window is clipped at the image's
    edges, so this share may be smaller than drawn. With `minmax`, (min, max), each side of the window is drawn between
    these shares of the image's side, and `alpha` is ignored (timm: `cutmix_minmax`). For other arguments see Mixup.
    """

    minmax: Shares | None = field(default=None, metadata=LATER)

    def _mixed(self, images: Tensor, others: Tensor, shares: Floats, places: Floats) -> tuple[Tensor, Tensor]:
        half = 0.5 * np.sqrt(1 - shares)
        firsts, ends, covered = [], [], np.ones(len(shares))
        for side, place, number in zip(images.shape[2:], places[:2], places[2:], strict=True):
            if self.minmax is None:
                center, reach = np.floor(place * side), np.floor(half * side)
                first, end = np.maximum(center - reach, 0), np.minimum(center + reach, side)
            else:
                low, high = (int(side * share) for share in self.minmax)
                length = np.where(shares < 1, low + np.floor(number * max(high - low, 1)), 0)
                first = np.floor(place * (side - length))
                end = first + length
            firsts.append(first)
            ends.append(end)
            covered *= (end - first) / side
        return torch.where(are_inside(images, firsts, ends), others, images), _on_device(1 - covered, images)


def _on_device(shares: Floats, images: Tensor) -> Tensor:
    return to_device(torch.from_numpy(shares.astype(np.float32)), images.device)


def _column(shares: Tensor, like: Tensor) -> Tensor:
    """Returns `shares`, (B,), as a tensor (B, 1, ...) that multiplies the samples of `like`."""
    return shares.to(like.device).view(-1, *[1] * (like.ndim - 1))
