"""The `transform` of a loader: fixed for an epoch, and called with each of its batches.

A transform of shardio.augment also gets the samples of the batch, and the sizes of the source images of a squashed
split. Its Program for a batch says what gather threads make of each image. The rest is applied here, to the whole
batch: on the CPU; or for a GPU, first on the host what a GPU cannot do, and the end on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.augment.batch import Images, check_no_masks
from shardio.augment.boxes import Draws, LoaderBatch, Looks
from shardio.augment.chain import Transform, on_device
from shardio.augment.per_sample import check_foreign, name_of
from shardio.augment.program import Program, makes_pixels
from shardio.format.layout import LABEL_ROW, LABELS_NAME, RowType
from shardio.loading.options import Function, Options, Parts
from shardio.loading.prefetch import Tensors, traced
from shardio.loading.ring import Slot
from shardio.reading.mixed import AnySet


class TransformStep:
    """Calls the loader's transform with each batch. Immutable; to be used by one thread."""

    def __init__(
        self,
        function: Function | None,
        options: Options,
        parts: Parts,
        shards: AnySet,
        indices: NDArray[np.int64] | None,
    ) -> None:
        """Raises ValueError if `function` does not suit the split. `indices`: the samples to read; None for all."""
        self.function = function
        self._options = options
        self._parts = parts
        if function is not None and parts.image_shape is None:
            raise ValueError(f"{shards.path}: batches have no images to transform: leave out transform=")
        self._shards = shards
        self._on_cpu = options.device.type == "cpu"
        self._ours = ours = _ours(function)
        if ours is not None:
            _check_classes(ours, parts.label_row, shards, indices)
        elif function is not None:
            if parts.masks:
                raise ValueError(
                    f"transform: {name_of(function)} gets only the images, so {', '.join(parts.masks)} would not move "
                    "with them; pass a transform of shardio.augment itself, without a function around it, or "
                    "PerSample(transform), or call the function in the training loop"
                )
            check_foreign(function)
        self.makes_pixels = ours is not None and makes_pixels(ours, self._on_cpu)
        """Whether gather threads make pixels, from regions of the stored images."""

    @property
    def description(self) -> str | None:
        """The digest of a transform of shardio.augment; None for any other function, or without a transform."""
        with contextlib.suppress(TypeError):  # if a part cannot be stored
            return self._ours.digest if self._ours else None
        return None

    def program(self, indices: NDArray[np.int64], draws: Draws, whole_lines: int = 0) -> Program | None:
        """Returns the Program of a transform of shardio for the samples `indices`; None for other functions, and for an
        empty batch. For `whole_lines` see `Program`. Raises the errors of the transform."""
        if self._ours is None or not len(indices):
            return None
        if self._ours.mixes:
            check_no_masks(self._parts.masks)
        shape, sizes = self._shards.sample_shape, self._shards.source_sizes(indices)
        program = Program.of(
            self._ours, draws, shape, sizes, whole_lines, self._on_cpu, self._options.check == "sample"
        )
        if not self._on_cpu and any(part.mixes for view in program.split()[0].views for part, _ in view.rest):
            raise ValueError(
                "on a GPU, Mixup and CutMix must come after PerSample and all crops, resizes, flips and color changes: "
                f'put them at the end of the transform, or load with device="cpu"; found {self._ours!r}'
            )
        return program

    @property
    def results(self) -> list[tuple[tuple[int, ...], Any]]:
        """The shape and dtype of each view that gather threads write for a whole batch. If they depend on the samples,
        as in a squashed split, the shape and dtype of stored images."""
        count = self._options.batch_size
        if self.makes_pixels:
            with contextlib.suppress(ValueError, IndexError):  # which each batch will raise, by then of its own samples
                one = np.zeros(1, np.int64)
                program = self.program(one, Draws(0, 0, one, looks=Looks(one, one)))
                assert program is not None
                return [((count, *shape[1:]), dtype) for shape, dtype in program.results]
        return [((count, *self._parts.stored_shape), np.uint8)]

    def on_host(self, slot: Slot, size: int, program: Program | None) -> tuple[torch.dtype, ...]:
        """Applies what a GPU cannot do to the first `size` samples of the slot, before it is copied to a GPU: PerSample
        and all that follows up to Normalize, and the moves of masks.

        Returns the dtype of each view if images changed, otherwise (). The slot then holds the bits of bfloat16 as
        uint16, as NumPy has no bfloat16.
        """
        if program is None:
            return ()
        first, _ = program.split()
        masks = {name: torch.from_numpy(slot.more[name][:size]) for name in self._parts.masks}
        if not masks and not any(view.rest for view in first.views):
            return ()
        dtypes: tuple[torch.dtype, ...] = ()
        with traced("shardio.transform"):
            images = [torch.from_numpy(view[:size].transpose(0, 3, 1, 2)) for view in slot.views]
            made, _, moved = first.finish(images, None, masks or None)
            if any(view.rest for view in first.views):
                tensors = made if isinstance(made, tuple) else (made,)
                dtypes = tuple(tensor.dtype for tensor in tensors)
                bits = (some.view(torch.uint16) if some.dtype == torch.bfloat16 else some for some in tensors)
                views = [view.permute(0, 2, 3, 1).numpy() for view in bits]
                # They may lie in the slot, where others of them will be.
                views = [view.copy() if np.may_share_memory(view, slot.memory) else view for view in views]
                slot.lay_out(*((view.shape, view.dtype) for view in views))
                for view, place in zip(views, slot.views, strict=True):
                    place[...] = view
            for name, mask in (moved or {}).items():
                for number, one in enumerate(mask) if isinstance(mask, tuple) else [(None, mask)]:
                    slot.put(name if number is None else f"{name}/{number}", one.numpy())
        return dtypes

    def __call__(
        self,
        tensors: Tensors,
        indices: NDArray[np.int64],
        draws: Draws | None,
        program: Program | None = None,
        dtypes: Sequence[torch.dtype] = (),
    ) -> tuple[Images, torch.Tensor | None, dict[str, Any]]:
        """Returns the transformed batch: images, labels, and arrays by name.

        Images are a tuple of tensors if the transform returns several views. Labels are None if there are none. A
        transform of shardio.augment also changes masks. `indices` are the samples, and `draws` are their random
        numbers. With `program`, `tensors` are what gather threads and `on_host` made by it, and `dtypes` is the result
        of `on_host`.
        """
        images = tensors.images
        more: dict[str, Any] = dict(tensors.more)
        labels = more.pop(LABELS_NAME, tensors.labels if self._parts.label_row == LABEL_ROW else None)
        if self.function is None:
            return images, labels, more
        assert draws is not None
        with traced("shardio.transform"):
            if program is not None:
                views = images if isinstance(images, tuple) else (images,)
                if self._on_cpu:
                    finished, targets, moved = program.finish(views, labels, self._masks(more))
                    return finished, targets, {**more, **(moved or {})}
                if dtypes:
                    views = tuple(view.view(dtype) for view, dtype in zip(views, dtypes, strict=True))
                finished, targets, _ = program.split()[1].finish(views, labels)
                for name in self._parts.masks:
                    if several := [key for key in more if key.startswith(f"{name}/")]:  # of several views
                        more[name] = tuple(more.pop(key) for key in several)
                return finished, targets, more
            assert isinstance(images, torch.Tensor)
            if self._ours is None:
                # An empty batch has the shapes of another sample.
                sizes = partial(self._shards.source_sizes, indices if len(indices) else np.zeros(1, np.int64))
                with LoaderBatch(images, draws, sizes).here():
                    return cast(torch.Tensor, self.function(images)), labels, more
            one, cpu = self._shards.source_sizes(np.zeros(1, np.int64)), torch.device("cpu")
            host = [on_device(some, cpu) for some in (images, labels, self._masks(more))]
            made = self._ours.changed(host[0], host[1], host[2], draws, one)
            finished, targets, moved = (on_device(some, images.device) for some in made)
            return finished, targets, {**more, **(moved or {})}

    def _masks(self, more: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """Returns the masks among a batch's arrays; None if the batch has no masks."""
        return {name: more[name] for name in self._parts.masks} or None


def _check_classes(
    transform: Transform, label_row: RowType | None, shards: AnySet, indices: NDArray[np.int64] | None
) -> None:
    """Raises ValueError if the transform mixes labels that the split lacks, or if its `num_classes` is wrong."""
    for number in transform.mixed_classes:
        if label_row is None:
            raise ValueError("transform: Mixup and CutMix mix labels; found a split without labels: leave them out")
        if label_row != LABEL_ROW:
            if number is not None:
                raise ValueError(
                    f"transform: Mixup and CutMix of float32 labels take no num_classes; found num_classes={number}"
                )
            continue
        expected, is_known = len(shards.classes), bool(shards.classes)
        if not is_known:  # the largest label, but others may need more classes
            labels = shards.labels if indices is None else shards.labels[indices]
            expected = int(labels.max(initial=-1)) + 1
        if number is None or number < expected or (is_known and number != expected):
            at_least = f"must have num_classes of at least {expected}"
            wanted = f"must have num_classes={expected}, like the set" if is_known else at_least
            raise ValueError(f"transform: Mixup and CutMix {wanted}; found num_classes={number}")


def _ours(transform: object) -> Transform | None:
    """Returns `transform`, or what torch.compile has wrapped in it, if that is a Transform of shardio; otherwise None.
    torch.compile compiles nothing of a Transform, and hides that it needs seed, epoch and samples."""
    original = transform
    # Only torch's own wrappers are looked through: a user's may do more than what it wraps.
    while getattr(original, "__globals__", {}).get("__name__", "").startswith("torch.") and hasattr(
        original, "__wrapped__"
    ):
        original = original.__wrapped__
    return original if isinstance(original, Transform) else None
