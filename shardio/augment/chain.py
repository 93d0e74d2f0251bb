"""Transform, the base class; Compose, which chains transforms; Views, which makes several images of each sample."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from shardio.augment.arguments import LATER, Configuration, is_of_shardio
from shardio.augment.batch import Arrays, Batch, Images, sizes_of
from shardio.augment.boxes import CURRENT, Draws, LoaderBatch, Numbers
from shardio.augment.masks import MaskFill, Masks, check_mask_fill
from shardio.system.eager import eager

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _Samples(TypedDict, total=False):
    """The keyword arguments of `Transform.__call__`, except `masks`."""

    indices: ArrayLike | None
    seed: int | None
    epoch: int | None
    view: int | None
    sizes: ArrayLike | None
    mask_fill: MaskFill | None


class Transform(Configuration, ABC):
    """The base class of transforms, which change the images of a batch. Threads may share a transform."""

    mask_fill: MaskFill | None = None
    """The default of the argument `mask_fill` of calls."""
    records: ClassVar[bool] = False
    """True if `apply` only records changes of uint8 images, and looks at no pixels."""
    casts: ClassVar[bool] = False
    """True for Normalize and ToDtype, whose `apply` records how images are normalized and cast."""
    on_any_device: ClassVar[bool] = False
    """True if images may be on a GPU."""

    @overload
    def __call__(
        self, images: Tensor, labels: None = None, *, masks: None = None, **samples: Unpack[_Samples]
    ) -> Images: ...
    @overload
    def __call__(
        self, images: Tensor, labels: Tensor, *, masks: None = None, **samples: Unpack[_Samples]
    ) -> tuple[Images, Tensor]: ...
    @overload
    def __call__(
        self, images: Tensor, labels: None = None, *, masks: Mapping[str, Tensor], **samples: Unpack[_Samples]
    ) -> tuple[Images, Arrays]: ...
    @overload
    def __call__(
        self, images: Tensor, labels: Tensor, *, masks: Mapping[str, Tensor], **samples: Unpack[_Samples]
    ) -> tuple[Images, Tensor, Arrays]: ...
    @eager
    def __call__(
        self,
        images: Tensor,
        labels: Tensor | None = None,
        *,
        masks: Mapping[str, Tensor] | None = None,
        mask_fill: MaskFill | None = None,
        indices: ArrayLike | None = None,
        seed: int | None = None,
        epoch: int | None = None,
        view: int | None = None,
        sizes: ArrayLike | None = None,
    ) -> Images | tuple[Images, Tensor] | tuple[Images, Arrays] | tuple[Images, Tensor, Arrays]:
        """Returns the new images; with labels or masks, a tuple: images, labels (if any), a dict of masks (if any).

        - `images`: uint8 (B, C, H, W), on the CPU; for a GPU see "What runs where" in the guide.
        - `labels`: int64 (B,), or float32 (B,) or (B, K), as after Mixup.
        - `masks`: (B, H, W) or (B, H, W, C) by name. `mask_fill`: the value of masks outside of the image, or a dict.
        - `indices`, `seed`, `epoch`, `view` seed the random numbers. Without `indices` and `seed`, torch draws a seed.
        - `sizes`: (B, 2), the original heights and widths of squashed images. An empty batch may pass one pair.

        Tensors are not changed in place; a tensor that needs no change is returned itself. A ShardLoader passes all
        these arguments. See "Masks" and "Calling a transform yourself" in the guide.
        """
        if not isinstance(images, Tensor) or not isinstance(labels, Tensor | None):
            found_types = f"images: {type(images).__name__}, labels: {type(labels).__name__}"
            raise TypeError(f"images and labels must be tensors, and labels may be None; found {found_types}")
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise ValueError(f"images must be uint8 (B, C, H, W); found {images.dtype} {tuple(images.shape)}")
        count = len(images)
        given, known = CURRENT.get(), None
        if given is not None:
            known, own = given.find(images)
            lacks_indices, sizes = indices is None and known is None, own if sizes is None else sizes
            if lacks_indices or sizes is None:
                raise ValueError(
                    f"in a loader's function, images must be its batch {tuple(given.images.shape)}, slices of it, or "
                    f"results of transforms; found others, {tuple(images.shape)}: pass their "
                    f"{'indices' if lacks_indices else 'sizes'}="
                )
        found = sizes_of(images) if sizes is None else np.asarray(_on_the_host(sizes), np.int64)
        if found.shape not in {(count, 2), (max(count, 1), 2)} or (found.size and found.min() < 1):
            least = f", minimum {found.min()}" if found.size else ""
            raise ValueError(
                f"sizes must be of shape {(count, 2)}, a height and a width per image, minimum 1; found shape "
                f"{found.shape}{least}"
            )
        forms = {(torch.int64, 1), (torch.float32, 1), (torch.float32, 2)}
        if labels is not None and not ((labels.dtype, labels.ndim) in forms and len(labels) == count):
            raise ValueError(
                f"labels must be int64 (B,), or float32 (B,) or (B, K), for {count} images; found {labels.dtype} "
                f"{tuple(labels.shape)}"
            )
        draws = _draws(count, given, known, indices, seed, epoch, view)
        if given is not None:
            given.places = known
        changed, labels, arrays = self.changed(images, labels, masks, draws, found, mask_fill)
        if arrays is None:
            return changed if labels is None else (changed, labels)
        return (changed, arrays) if labels is None else (changed, labels, arrays)

    def changed(
        self,
        images: Tensor,
        labels: Tensor | None,
        masks: Mapping[str, Tensor] | None,
        draws: Draws,
        sizes: NDArray[np.int64] | None = None,
        mask_fill: MaskFill | None = None,
    ) -> tuple[Images, Tensor | None, Arrays | None]:
        """Returns the new images, the labels or None, and the masks by name or None. For the arguments see `__call__`;
        `draws` are the random numbers of the samples."""
        mask_fill = self.mask_fill if mask_fill is None else mask_fill
        moving = Masks.of(images, masks, mask_fill)
        sizes = sizes_of(images) if sizes is None else sizes
        if not len(images):  # one blank image shows the shapes and dtypes of the result
            blank = [
                _for_each(lambda some: some.new_zeros((1, *some.shape[1:])), part) for part in (images, labels, masks)
            ]
            draws = Draws(0, 0, np.zeros(1, np.int64))
            made = self.changed(*blank, draws, sizes if len(sizes) else None, mask_fill)  # type: ignore[call-arg]
            return _for_each(lambda some: some[:0], made)  # type: ignore[no-any-return]
        batches = self.branches(Batch(images, draws, sizes, labels, moving), type(self).__name__)
        done = [batch.finished() for batch in batches]
        if (given := CURRENT.get()) is not None and given.places is not None:
            given.made += [(each.images, given.places, each.sizes) for each in done]
        return results_of(done, self.has_views)

    @property
    def mixed_classes(self) -> frozenset[int | None]:
        """The `num_classes` arguments of every Mixup and CutMix in the transform. Empty if it has neither.

        An argument is None if the Mixup or CutMix is for float32 labels, which need no number of classes.
        """
        return frozenset[int | None]().union(*(part.mixed_classes for part in self._inner))

    @property
    def _inner(self) -> list[Transform]:
        return [part for part in getattr(self, "transforms", ()) if isinstance(part, Transform)]

    def with_inner(self, view: int | None = None) -> Iterator[Transform]:
        """Yields the transform and all transforms inside of it; with `view`, only those that make this view."""
        yield self
        for part in self._inner:
            yield from part.with_inner(view)

    @property
    def mixes(self) -> bool:
        """True if the transform combines images of different samples, and their labels."""
        return bool(self.mixed_classes)

    @property
    def has_views(self) -> bool:
        """True if the transform returns several images of each sample."""
        return any(part.has_views for part in self._inner)

    @property
    def num_views(self) -> int:
        """The number of images that the transform returns of each sample."""
        return max((part.num_views for part in self._inner), default=1)

    def branches(self, batch: Batch, purpose: str) -> list[Batch]:
        """Returns [the batch after this transform], or one batch per view if the transform has views. See `apply`."""
        return [self.apply(batch, purpose)]

    @abstractmethod
    def apply(self, batch: Batch, purpose: str) -> Batch:
        """Returns the batch after this transform.

        Random numbers depend on the string `purpose`. Each transform of a Compose gets a different `purpose`.
        """


Piece = tuple[Transform, str]
"""A transform, and the `purpose` of its `apply`."""


def branches_of(pieces: Iterable[Piece], batch: Batch) -> list[Batch]:
    """Applies `pieces`, (transform, purpose) each. Returns [the batch after them], or one batch per view if the last
    transform has views.

    A deferred batch, which has no pixels yet, notes in its `rest` the transforms that need pixels.
    """
    batches = [batch]
    for transform, purpose in pieces:
        batch = batches[0]
        if batch.is_deferred and _must_wait(transform, batch):
            batches = [replace(batch, rest=(*batch.rest, (transform, purpose)))]
        else:
            batches = transform.branches(batch, purpose)
    return batches


def _must_wait(transform: Transform, batch: Batch) -> bool:
    """Returns whether a transform cannot be applied to a deferred batch, which has no pixels."""
    if type(transform) is Compose:
        return False  # but its parts may have to
    if batch.rest:
        return True
    if type(transform) is Views:
        return batch.is_cast
    if transform.casts and is_of_shardio(type(transform)):
        return not batch.casts
    return batch.is_cast or not is_recorded(transform)


def is_recorded(transform: Transform) -> bool:
    """Returns whether a transform only records changes in the batch, and computes no pixels; casts do not count."""
    return all(part.records and is_of_shardio(type(part)) for part in transform.with_inner())


def runs_anywhere(transform: Transform) -> bool:
    """Returns whether a transform takes images on any device."""
    return all(part.on_any_device and is_of_shardio(type(part)) for part in transform.with_inner())


def results_of(done: Sequence[Batch], has_views: bool) -> tuple[Images, Tensor | None, Arrays | None]:
    """Returns the images of finished batches, the labels or None, and the masks by name or None.

    If `has_views`, the images and each mask are tuples with a tensor per batch.
    """
    several = [each.masks.by_name for each in done if each.masks is not None]
    images, labels = tuple(each.images for each in done), done[0].labels
    if not has_views:
        return images[0], labels, {**several[0]} if several else None
    return images, labels, {name: tuple(each[name] for each in several) for name in several[0]} if several else None


class Container(Transform):
    """A transform that consists of other transforms: the base class of Compose, Views, RandomApply and others."""

    records = on_any_device = True  # by itself, whatever is inside
    transforms: Iterable[Transform]
    instead_of_mixing: ClassVar[str] = ""
    """Why Mixup and CutMix cannot be inside, and what to do instead, for the error. Empty if they can be inside."""

    def __post_init__(self) -> None:
        if not isinstance(self.transforms, Iterable):
            raise TypeError(f"transforms must be a list of transforms; found {self.transforms!r}")
        parts = tuple(self.transforms)
        object.__setattr__(self, "transforms", parts)
        super().__post_init__()
        for number, transform in enumerate(parts):
            if not isinstance(transform, Transform):
                raise ValueError(
                    f"transforms must be from shardio.augment; found {transform!r}: wrap a function of one image in "
                    "PerSample"
                )
            is_last = isinstance(self, Compose) and number == len(parts) - 1
            if transform.has_views and not (is_last or isinstance(self, Views)):
                raise ValueError(
                    "Views may only be the last transform of a Compose, or one of the transforms of another Views; "
                    f"found as transforms[{number}] of {type(self).__name__}: {transform!r}"
                )
            if transform.mask_fill is not None:
                raise ValueError(f"only the outermost Compose or Views may have mask_fill; found it in {transform!r}")
        if self.mixes and self.instead_of_mixing:
            raise ValueError(f"{type(self).__name__} cannot have Mixup or CutMix inside, {self.instead_of_mixing}")
        if not parts and not isinstance(self, Compose):
            raise ValueError(f"{type(self).__name__} needs one or more transforms; found none")
        if self.mask_fill is not None:
            check_mask_fill(self.mask_fill)


def _draws(
    count: int,
    given: LoaderBatch | None,
    known: Numbers | None,
    indices: ArrayLike | None,
    seed: int | None,
    epoch: int | None,
    view: int | None,
) -> Draws:
    """Returns the random numbers of one call of a transform.

    Inside of a loader, `given` is its batch, which has the seed, epoch or view that is not passed, and `known` are the
    places of the images in it. Outside, both are None, and seed, epoch and view are 0; but without `indices`,
    torch draws a seed that is not passed.
    """
    if given is not None and known is not None and indices is None:
        return replace(
            given.draws[known],
            seed=given.draws.seed if seed is None else seed,
            epoch=given.draws.epoch if epoch is None else epoch,
            view=given.next_view(known) if view is None else view,
        )
    if indices is None:
        if epoch is not None:
            raise ValueError(
                "epoch needs indices of the samples: without indices, all batches of the epoch would get the same "
                "random numbers. Leave out epoch and seed to draw new random numbers at each call"
            )
        # Drawn once, when first used: a transform without random numbers leaves torch's generator alone.
        fresh = cache(lambda: int(torch.randint(1 << 62, (), device="cpu")))
        return Draws(fresh if seed is None else seed, 0, np.arange(count), view or 0)
    numbers = np.asarray(_on_the_host(indices))
    if numbers.shape != (count,) or (count and numbers.dtype.kind not in "iu"):  # NumPy makes floats of no numbers
        raise ValueError(f"indices must be integers of shape {(count,)}; found {numbers.dtype} {numbers.shape}")
    return Draws(seed or 0, epoch or 0, numbers.astype(np.int64), view or 0)


def _for_each(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Returns `value`, a tensor, None, or a tuple or mapping of these, with `function` applied to every tensor."""
    if isinstance(value, Mapping):
        return {name: _for_each(function, part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_for_each(function, part) for part in value)
    return None if value is None else function(value)


def on_device(value: Any, device: torch.device) -> Any:
    """Returns `value`, a tensor, None, or a tuple or mapping of these, with every tensor on `device`."""
    return _for_each(lambda tensor: tensor.to(device), value)


def _on_the_host(values: ArrayLike | Tensor) -> ArrayLike:
    return values.cpu() if isinstance(values, Tensor) else values


@dataclass(frozen=True, repr=False)
class Compose(Container):
    """Applies transforms in order.

    `mask_fill` is the value of masks outside of the image: a number, or a dict of numbers by the name of the mask.
    """

    transforms: Iterable[Transform]
    mask_fill: MaskFill | None = field(default=None, metadata=LATER)

    def apply(self, batch: Batch, purpose: str) -> Batch:
        (changed,) = self.branches(batch, purpose)
        return changed

    def branches(self, batch: Batch, purpose: str) -> list[Batch]:
        return branches_of(self.parts(purpose), batch)

    def parts(self, purpose: str) -> Iterator[Piece]:
        """Yields (transform, the purpose to pass to its `apply`). Each purpose begins with `purpose` and is unique."""
        # Numbered per class: adding or removing a transform without randomness does not change the others' draws.
        numbers = Counter[str]()
        for transform in self.transforms:
            name = type(transform).__name__
            yield transform, f"{purpose}/{name} {numbers[name]}"
            numbers[name] += 1


def _at_once(transform: Transform, batch: Batch, views: range, purpose: str) -> list[Batch]:
    """Returns `batch` after `transform` for each view, numbered as in `views`. Computes all views as one batch.

    `batch` has neither masks nor recorded changes.
    """
    count, several = len(batch), len(views)
    draws = replace(batch.draws[np.tile(np.arange(count), several)], view=np.repeat(views, count))
    together = replace(batch, draws=draws, sizes=np.tile(batch.sizes, (several, 1)), labels=None)
    (made,) = branches_of([(transform, purpose)], together)
    done, shared = made.closed(), len(batch.stages)
    return [
        replace(done.part(slice(i * count, (i + 1) * count), shared), draws=replace(batch.draws, view=view))
        for i, view in enumerate(views)
    ]


@dataclass(frozen=True, repr=False)
class Views(Container):
    """Returns several images of each sample: the images of a batch are a tuple, with a tensor per transform.

    Equal transforms draw different random numbers. Put transforms that all views share before Views in a Compose: they
    are drawn and computed once. Views inside Views add to the same tuple. Each mask is a tuple, too. Labels are
    returned once, unchanged. For `mask_fill` see Compose.
    """

    transforms: Sequence[Transform]
    mask_fill: MaskFill | None = field(default=None, metadata=LATER)
    has_views = True
    instead_of_mixing = "as each view would need labels of its own: put them before Views, or mix in the training loop"

    @property
    def num_views(self) -> int:
        return sum(part.num_views for part in self.transforms)

    def with_inner(self, view: int | None = None) -> Iterator[Transform]:
        yield self
        for part in self.transforms:
            if view is None or 0 <= view < part.num_views:
                yield from part.with_inner(view)
            view = None if view is None else view - part.num_views

    def branches(self, batch: Batch, purpose: str) -> list[Batch]:
        # A crop alone stays recorded: each view may resize the stored image.
        if batch.filter or batch.steps or batch.is_cast:
            batch = batch.made()
        draws = batch.draws
        if purpose != "Views":  # inner Views of different lengths may use the same view numbers
            purpose = f"{purpose} {draws.view}"
        made: list[Batch] = []
        first = draws.view * len(self.transforms)
        for transform, equal in groupby(self.transforms):
            views = range(first, first := first + len([*equal]))
            is_plain = batch.masks is None and batch.is_whole
            # Nothing is known of what the apply of other classes does.
            is_known = all(is_of_shardio(type(part)) for part in transform.with_inner())
            if len(views) > 1 and is_plain and not transform.has_views and is_known:
                made += _at_once(transform, batch, views, purpose)
                continue
            for view in views:
                own = replace(draws, view=view)
                made += branches_of([(transform, purpose)], replace(batch, draws=own, labels=None))
        return [replace(each, labels=batch.labels) for each in made]

    def apply(self, batch: Batch, purpose: str) -> Batch:
        raise ValueError("Views returns several images of each sample: call branches() instead of apply()")
