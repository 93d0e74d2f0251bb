"""RandomApply, RandomChoice and RandomOrder, which choose among transforms for each image separately."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from shardio.augment.arguments import Probability, check_number
from shardio.augment.batch import Batch, check_no_masks, sizes_of
from shardio.augment.boxes import MOST_DRAWS, Boxes, Numbers
from shardio.augment.chain import Compose, Container, Transform
from shardio.augment.masks import Masks
from shardio.augment.resample import to_device
from shardio.augment.stage import Choice
from shardio.augment.steps import merged


def chosen_of(base: Batch, alternatives: Sequence[Batch], numbers: Numbers) -> Batch:
    """Returns a batch that takes image i from `alternatives[numbers[i]]`. `numbers` is int64 (B,).

    The alternatives are `base` after different transforms. If the transforms only recorded changes, the choice is
    recorded, too. Otherwise the pixels of all alternatives are computed.
    """
    first = alternatives[0]
    if not all(_are_alike(base, first, other) for other in alternatives):
        return _computed(base, alternatives, numbers)
    picked = numbers, np.arange(len(base))
    before = len(base.steps)
    changed = replace(
        first,
        steps=(*base.steps, *merged([other.steps[before:] for other in alternatives], numbers)),
        sizes=np.stack([other.sizes for other in alternatives])[picked],
    )
    if any(other.flips is not None for other in alternatives):
        changed = replace(changed, flips=np.stack([other.is_mirrored for other in alternatives])[picked])
    if any(other.boxes is not None for other in alternatives):
        changed = replace(
            changed,
            boxes=Boxes.picked([other.region for other in alternatives], numbers),
            within=Boxes.picked([other.within or other.region for other in alternatives], numbers),
        )
    return changed


def _are_alike(base: Batch, first: Batch, other: Batch) -> bool:
    """Returns whether `other` is `base` with more changes, and equals `first` but for boxes, sizes, flips, steps."""
    noted = other.images is base.images and other.steps[: len(base.steps)] == base.steps
    same = (first.filter, first.cast) == (other.filter, other.cast)
    return noted and other.labels is base.labels and same and (first.filter is None or first.filter.cubic is None)


def _computed(base: Batch, alternatives: Sequence[Batch], numbers: Numbers) -> Batch:
    # Some may have undone that images were squashed, as what looks at neighbors does.
    done = [other.unsquashed().finished() for other in alternatives]
    images, labels = done[0].images, done[0].labels
    masks = [other.masks for other in done if other.masks is not None]
    for number, other in enumerate(done[1:], start=1):
        if other.images.shape != images.shape or other.images.dtype != images.dtype:
            found = " and ".join(f"{some.dtype} {tuple(some.shape)}" for some in (images, other.images))
            raise ValueError(
                f"RandomApply, RandomChoice and RandomOrder can choose among images of one size and dtype only; "
                f"found {found}"
            )
        if base.is_deferred:
            continue
        mine = to_device(torch.from_numpy(numbers == number), images.device)
        images = torch.where(mine[:, None, None, None], other.images, images)
        if labels is not None and other.labels is not None and other.labels is not labels:
            if other.labels.shape != labels.shape:
                raise ValueError("RandomChoice: all transforms must mix labels, or none of them; found both kinds")
            labels = torch.where(mine[:, None] if labels.ndim == 2 else mine, other.labels, labels)
    if base.is_deferred:
        channels, height, width = base.images.shape[1:]
        stages = tuple(other.stages[len(base.stages) :] for other in done)
        choice = Choice((height, width, channels), (images.shape[2], images.shape[3]), numbers, stages)
        return base.after(choice, sizes_of(images))
    chosen = replace(done[0], images=images, labels=labels)
    return replace(chosen, masks=Masks.chosen(masks, numbers)) if masks else chosen


@dataclass(frozen=True, repr=False)
class RandomApply(Container):
    """Applies all of `transforms`, in order, to each image with probability `p`."""

    transforms: Sequence[Transform]
    p: Probability = 0.5
    instead_of_mixing = "which combine several images: use their argument p"

    def apply(self, batch: Batch, purpose: str) -> Batch:
        wanted = batch.draws.uniform(purpose, 1)[0] < self.p
        return chosen_of(batch, [batch, Compose(self.transforms).apply(batch, purpose)], wanted.astype(np.int64))


@dataclass(frozen=True, repr=False)
class RandomChoice(Container):
    """Applies one of several transforms to each image.

    `p` is a probability per transform (default: equal). If there is a Mixup or CutMix without `per_sample`, the whole
    batch gets the same transform, drawn by the batch's first sample. With `per_sample` (timm's mode "elem"), each image
    gets its own.
    """

    transforms: Sequence[Transform]
    p: Sequence[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p is not None:
            shares = self.p if isinstance(self.p, tuple) else ()
            for share in shares:
                check_number("p", share, 0)
            if len(shares) != len(self.transforms) or not 0 < sum(shares) < math.inf:
                expected = f"{len(self.transforms)} probabilities, one per transform, not all 0"
                raise ValueError(f"p must be {expected}; found {self.p!r}")

    def apply(self, batch: Batch, purpose: str) -> Batch:
        if self.mixes:
            check_no_masks(batch.masks.by_name if batch.masks else ())
        shares = np.cumsum([1.0] * len(self.transforms) if self.p is None else self.p)
        # A Mixup or CutMix without `per_sample` draws once for a batch.
        mixing = (part for part in self.with_inner() if part.mixes and not isinstance(part, Container))
        is_one_choice = not all(getattr(part, "per_sample", False) for part in mixing)
        draws = batch.draws.of_the_batch() if is_one_choice else batch.draws
        found = np.searchsorted(shares, draws.uniform(purpose, 1)[0] * shares[-1], side="right")
        numbers = np.minimum(found, len(shares) - 1)
        if is_one_choice:
            number = int(numbers[0])
            return self.transforms[number].apply(batch, f"{purpose}/{number}")
        made = [transform.apply(batch, f"{purpose}/{number}") for number, transform in enumerate(self.transforms)]
        return chosen_of(batch, made, numbers)


@dataclass(frozen=True, repr=False)
class RandomOrder(Container):
    """Applies all of `transforms`, in a random order for each image."""

    transforms: Sequence[Transform]
    instead_of_mixing = "which must come last: put them after RandomOrder"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.transforms) > MOST_DRAWS:
            raise ValueError(f"RandomOrder takes at most {MOST_DRAWS} transforms; found {len(self.transforms)}")

    def apply(self, batch: Batch, purpose: str) -> Batch:
        order = batch.draws.uniform(purpose, len(self.transforms)).argsort(axis=0)
        for numbers in order:
            made = [transform.apply(batch, f"{purpose}/{number}") for number, transform in enumerate(self.transforms)]
            batch = chosen_of(batch, made, numbers)
        return batch
