"""Program, which says what a transform makes of each sample of a batch, before any image is read.

Random numbers do not depend on pixels. So the changes of single images are recorded first, and the threads that read
the images make their pixels (`Program.make`). What works on whole batches, or looks at pixels, is called with the
results (`Program.finish`): from the first Mixup, CutMix or PerSample on, or the first step after Normalize.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from numpy.typing import NDArray

from shardio.augment.arguments import is_of_shardio
from shardio.augment.batch import Arrays, Batch, Images, sizes_of
from shardio.augment.boxes import Draws, Numbers
from shardio.augment.chain import Compose, Transform, Views, branches_of, is_recorded, results_of, runs_anywhere
from shardio.augment.masks import Masks
from shardio.augment.resample import as_made
from shardio.augment.stage import Stage, joined, moved_by, run, run_and_cast, windows_of
from shardio.kernels.resample import Planes
from shardio.kernels.rowcopy import Windows


def makes_pixels(transform: Transform, casts: bool) -> bool:
    """Returns whether a transform begins with changes of single images, which gather threads make.

    With `casts`, Normalize and ToDtype are such changes.
    """
    if type(transform) is Compose:
        return any(makes_pixels(part, casts) for part in [*transform.transforms][:1])
    if type(transform) is Views:
        return any(makes_pixels(part, casts) for part in transform.transforms)
    return (casts and transform.casts and is_of_shardio(type(transform))) or is_recorded(transform)


# Bytes of stored images to make at a time in several passes: images between passes stay in the processor's caches.
_CACHED_NBYTES = 4 << 20


@dataclass(frozen=True, eq=False)
class Program:
    """What a transform makes of a batch. Immutable; any thread may make some of the images.

    `views` has a batch for each view of the transform (one, if it has no Views), without pixels yet: its changes are in
    its `stages`, `cast` and `rest`. `source` is the height, width and channels of stored images. For `whole_lines` see
    `joined`; with `reads_all`, whole images are read.
    """

    transform: Transform
    views: tuple[Batch, ...]
    source: tuple[int, int, int]
    whole_lines: int = 0
    reads_all: bool = False

    @classmethod
    def of(
        cls,
        transform: Transform,
        draws: Draws,
        source: tuple[int, int, int],
        sizes: Numbers | None = None,
        whole_lines: int = 0,
        casts: bool = True,
        reads_all: bool = False,
    ) -> Program:
        """Returns the program of a batch of the samples of `draws`. Raises the errors of the transform.

        - `source`: the height, width and channels of stored images; for `sizes` see `Transform.__call__`
        - `casts`: whether Normalize and ToDtype are made by `make` too, and not by `finish`
        """
        height, width, channels = source
        images = torch.empty((len(draws.counters), channels, height, width), dtype=torch.uint8, device="meta")
        batch = Batch(images, draws, sizes_of(images) if sizes is None else sizes, casts=casts)
        views = branches_of([(transform, type(transform).__name__)], batch)
        return cls(transform, tuple(view.closed() for view in views), source, whole_lines, reads_all)

    def __len__(self) -> int:
        return len(self.views[0])

    @cached_property
    def windows(self) -> Windows:
        """The window of each stored image that `make` reads: a rectangle that has all pixels that any view needs."""
        if self.reads_all:
            return Windows.whole(len(self), *self.source[:2])
        several = [windows_of(view.stages, self.source, len(self)) for view in self.views]
        return joined(several, self.whole_lines, self.source[:2])

    @property
    def results(self) -> list[tuple[tuple[int, ...], Any]]:
        """For each view, what `make` writes: the shape (B, height, width, channels), and the NumPy dtype."""
        return [((len(self), *view.images.shape[2:], self.source[2]), view.cast.kernel_dtype) for view in self.views]

    @cached_property
    def _num_shared(self) -> int:
        """The number of stages that all views have in common."""
        first, number = self.views[0].stages, 0
        if len(self.views) > 1:
            while all(len(view.stages) > number and view.stages[number] is first[number] for view in self.views):
                number += 1
        return number

    def make(self, planes: Planes, some: Numbers, outs: Sequence[NDArray[Any]]) -> None:
        """Makes the images `some`, numbers in the batch, in ascending order. Writes view k to `outs[k][some]`.

        `planes` are the `windows` of these images. `outs` has an array for each of `results`. Raises OSError if a page
        of a mapped file cannot be read.
        """
        stages = self.views[0].stages
        shared = stages[: self._num_shared]
        is_one_pass = len(self.views) == 1 and len(stages) < 2
        is_one_pass &= all(isinstance(stage, Stage) and not stage.steps for stage in stages)
        step = len(some) if is_one_pass else max(1, _CACHED_NBYTES // math.prod(self.source))
        for first in range(0, len(some), step):
            part, pixels = some[first : first + step], planes[first : first + step]
            if shared:
                pixels = Planes.of_images(run(shared, pixels, part, (*shared[-1].size, planes.channels)))
            for view, out in zip(self.views, outs, strict=True):
                run_and_cast(view.stages[len(shared) :], pixels, part, out, view.cast)

    def finish(
        self,
        images: Sequence[torch.Tensor],
        labels: torch.Tensor | None,
        masks: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[Images, torch.Tensor | None, Arrays | None]:
        """Applies what is left of the transform. Returns images, labels or None, and masks by name or None.

        `images` are the results of `make`, (B, C, height, width) each, in channels_last memory, and may be changed in
        place. If `make` was not called, they are one batch, for all views. For `labels` and `masks` see
        `Transform.__call__`.
        """
        stand_in = torch.empty((), dtype=torch.uint8).expand((len(self), self.source[2], *self.source[:2]))
        moving = Masks.of(stand_in, masks, self.transform.mask_fill)
        done: list[Batch] = []
        images = list(images) * (len(self.views) if len(images) == 1 else 1)
        for view, pixels in zip(self.views, images, strict=True):
            moved = None if moving is None else moved_by(view.stages, moving)
            batch = Batch(as_made(pixels, view.cast), view.draws, view.sizes, labels, moved)
            done += [each.finished() for each in branches_of(view.rest, batch)]
        return results_of(done, self.transform.has_views)

    def split(self) -> tuple[Program, Program]:
        """Returns two programs: one without the last transforms that also take images on a GPU, one with only these."""
        before, after = [], []
        for view in self.views:
            number = len(view.rest)
            while number and runs_anywhere(view.rest[number - 1][0]):
                number -= 1
            # RandomErasing of uint8 images may have to undo that they were squashed.
            while number < len(view.rest) and not (view.rest[number][0].casts or view.rest[number][0].mixes):
                number += 1
            before.append(replace(view, rest=view.rest[:number]))
            # Views are last: those before the end have made several images of each of this view's.
            several = view.rest[number - 1][0].num_views if number else 1
            after += [replace(view, stages=(), rest=view.rest[number:])] * several
        return replace(self, views=tuple(before)), replace(self, views=tuple(after))
