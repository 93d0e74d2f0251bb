"""Masks and boxes of a batch, which go through the same crops, flips and warps as their images.

Masks are read by nearest neighbor. First, a crop and a resize select rows and columns of the mask. Then the bytes of
the mask go through the same steps as the image, as if they were its channels. The corners of boxes are multiplied by
the matrices of the same maps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardio.augment.boxes import Boxes, Places, nearest_places, outside_places
from shardio.augment.checks import check_number
from shardio.augment.pixels import run_steps
from shardio.augment.resample import to_device
from shardio.augment.steps import FILL_AT, SAMPLING_AT, Op, Sampling, Step, Steps
from shardio.kernels.pixels import in_slices

Floats = NDArray[np.float64]
MaskFill = float | Mapping[str, float]
"""The value of masks outside of the image: a number, or a mapping of mask names to numbers."""

Size = tuple[int, int] | NDArray[np.int64]
"""Height and width of all images, or of each, (2, B)."""

MOVES = (Op.AFFINE, Op.PERSPECTIVE, Op.MIRROR, Op.FLIP)
"""Operations that move pixels."""

# So many channels go through the kernel of steps at once.
_CHANNELS = 64
# Masks are copied as these, by the size of an element: torch can do less with other dtypes.
_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
# A box of which less is left becomes no box. Its sides have been multiplied and divided, so that 1 may be a bit less.
_LEAST = 1 - 1e-6


def crop_matrices(boxes: Boxes, flips: NDArray[np.bool_], sizes: NDArray[np.int64]) -> Floats:
    """Returns matrices, (B, 3, 3), that map points (x, y, 1) of images to the result of a crop, a resize and a flip.

    `boxes` are cropped, resized to `sizes`, (B, 2) or (1, 2), and mirrored where `flips` is true.
    """
    height, width = sizes.T
    across, down = width / boxes.widths, height / boxes.heights
    matrices = np.zeros((len(flips), 3, 3))
    matrices[:, 0, 0] = np.where(flips, -across, across)
    matrices[:, 0, 2] = np.where(flips, width + boxes.lefts * across, -boxes.lefts * across)
    matrices[:, 1, 1] = down
    matrices[:, 1, 2] = -boxes.tops * down
    matrices[:, 2, 2] = 1
    return matrices


def step_matrices(step: Step, size: tuple[int, int]) -> Floats:
    """Returns matrices, (B, 3, 3), that map points (x, y, 1) of images of `size` to their places after a step."""
    height, width = size
    matrices = np.tile(np.eye(3), (len(step), 1, 1))
    matrices[step.codes == Op.MIRROR, 0] = -1, 0, width
    matrices[step.codes == Op.FLIP, 1] = 0, -1, height
    warps = (step.codes == Op.AFFINE) | (step.codes == Op.PERSPECTIVE)
    # These tell where the pixels of the result are read.
    read = np.concatenate([step.values[warps, :8], np.ones((warps.sum(), 1))], axis=1).reshape(-1, 3, 3)
    rows = read.transpose(1, 0, 2)
    # The inverse times the determinant. That of a map onto a line is zeros, through which no box gets.
    inverse = np.stack([np.cross(rows[i - 2], rows[i - 1]) for i in range(3)], axis=2)
    affine = ~read[:, 2, :2].any(axis=1)
    with np.errstate(all="ignore"):
        inverse[affine] /= inverse[affine][:, 2:, 2:]
    matrices[warps] = inverse
    return matrices


def boxes_through(boxes: Tensor, matrices: Floats, size: Size) -> Tensor:
    """Maps the corners of boxes, (B, K, 5), by `matrices`, (B, 3, 3), and returns the upright boxes around the results.

    The boxes, (B, K, 5), are as small as possible, and clipped to `size`. See `settled` for boxes that leave the image.
    """
    numbers = to_device(torch.from_numpy(matrices).to(boxes.dtype), boxes.device)
    left, top, right, bottom = boxes[..., :4].unbind(2)
    across, down = torch.stack([left, right, right, left], dim=2), torch.stack([top, top, bottom, bottom], dim=2)
    # All (B, K, 4): the corners' places are x and y, divided by the depth.
    x, y, depth = (row[:, 0] * across + row[:, 1] * down + row[:, 2] for row in numbers[:, :, :, None, None].unbind(1))
    if not matrices[:, 2, :2].any():  # the depth is 1
        return settled(torch.stack([x.amin(2), y.amin(2), x.amax(2), y.amax(2), boxes[..., 4]], dim=2), size)
    # A box may cross the horizon, where the depth is 0. It has two parts then, which go on to infinity.
    further = depth.roll(-1, 2)
    crosses = depth * further < 0
    share = depth / torch.where(crosses, depth - further, 1)
    parts = []
    for side in (1, -1):
        sides: list[Tensor] = []
        for place in (x, y):
            there = torch.where(side * depth > 0, place / depth, torch.nan)
            end = torch.sign(place + share * (place.roll(-1, 2) - place)) * (side * torch.inf)
            places = torch.cat([there, torch.where(crosses, end, torch.nan)], dim=2)
            missing = places.isnan()
            sides += torch.where(missing, torch.inf, places).amin(2), torch.where(missing, -torch.inf, places).amax(2)
        low_x, high_x, low_y, high_y = sides
        parts.append(settled(torch.stack([low_x, low_y, high_x, high_y, boxes[..., 4]], dim=2), size))
    one, other = parts
    lows, highs = torch.minimum(one, other)[..., :2], torch.maximum(one, other)[..., 2:]
    both = torch.cat([lows, highs], dim=2)
    return torch.where(one[..., 4:] < 0, other, torch.where(other[..., 4:] < 0, one, both))


def _clipped(places: Tensor, limit: int | NDArray[np.int64]) -> Tensor:
    """Returns places, (B, K, 2), clipped to the range from 0 to `limit`, a number for all or for each image."""
    if isinstance(limit, int):
        return places.clamp(0, limit)
    limits = to_device(torch.from_numpy(limit[:, None, None]), places.device)
    return torch.minimum(places.clamp(min=0), limits.to(places.dtype))


def settled(boxes: Tensor, size: Size, least: float = _LEAST) -> Tensor:
    """Returns boxes, (B, K, 5), clipped to an image of `size`.

    If less than `least` pixels of its width or height are left, a box is removed: it becomes zeros with the label -1.
    """
    height, width = size
    x, y = _clipped(boxes[..., 0:4:2], width), _clipped(boxes[..., 1:4:2], height)
    # NaN is not at least anything.
    kept = (x[..., 1] - x[..., 0] >= least) & (y[..., 1] - y[..., 0] >= least) & (boxes[..., 4] >= 0)
    inside = torch.stack([x[..., 0], y[..., 0], x[..., 1], y[..., 1], boxes[..., 4]], dim=2)
    nothing = torch.zeros_like(inside)
    nothing[..., 4] = -1
    return torch.where(kept[..., None], inside, nothing)


@dataclass(frozen=True, eq=False)
class Targets:
    """The masks, (B, H, W, ...), and the boxes, (B, K, 5), of images of `size`, (H, W).

    `fills` are the values of masks outside of the image, by name. Boxes are clipped to the image. They are float64, or
    float32 on MPS; `arrays` returns float32. Tensors are not changed in place.
    """

    size: tuple[int, int]
    masks: Mapping[str, Tensor]
    fills: Mapping[str, float]
    boxes: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        images: Tensor,
        masks: Mapping[str, Tensor] | None,
        boxes: Mapping[str, Tensor] | None,
        mask_fill: MaskFill | None,
    ) -> Targets | None:
        """Returns the targets of `images`; None if `masks` and `boxes` are None.

        Raises TypeError or ValueError for masks, boxes and fills that do not fit the images.
        """
        if masks is None and boxes is None:
            return None
        masks, boxes = _checked("masks", masks, images), _checked("boxes", boxes, images)
        if both := sorted(masks.keys() & boxes.keys()):
            raise ValueError(f"masks and boxes must have different names; found {', '.join(both)} in both")
        count, _, height, width = images.shape
        for name, mask in masks.items():
            if mask.ndim not in (3, 4) or mask.shape[:3] != (count, height, width):
                expected = f"({count}, {height}, {width}) or ({count}, {height}, {width}, C)"
                raise ValueError(f"masks[{name!r}] must be {expected}, like the images; found {tuple(mask.shape)}")
        for name, some in boxes.items():
            if some.dtype != torch.float32 or some.ndim != 3 or some.shape[::2] != (count, 5):
                raise ValueError(
                    f"boxes[{name!r}] must be float32 ({count}, K, 5), left, top, right, bottom and label; found "
                    f"{some.dtype} {tuple(some.shape)}"
                )
        # MPS has no float64.
        exact = torch.float32 if images.device.type == "mps" else torch.float64
        size = height, width
        inside = {name: settled(some.to(exact), size, least=1e-9) for name, some in boxes.items()}
        return cls(size, masks, _fills(masks, 0 if mask_fill is None else mask_fill), inside)

    def moved(self, boxes: Boxes | None, flips: NDArray[np.bool_], size: tuple[int, int], steps: Steps) -> Targets:
        """Returns the targets after a crop to `boxes`, a resize to `size`, a flip where `flips` is true, and steps.

        If `boxes` is None, there are only steps, and `flips` is ignored.
        """
        moving = tuple(step for step in map(_moving, steps) if not step.does_nothing)
        rows = columns = None
        matrices = []
        if boxes is None:
            if not moving:
                return self
        else:
            sizes = np.tile(np.array(size), (len(flips), 1))
            rows, columns = self._sources(boxes, flips, sizes, *(np.arange(side)[None] for side in size))
            matrices = [crop_matrices(boxes, flips, sizes)]
        return self._moved(size, rows, columns, matrices, moving)

    def placed(
        self,
        boxes: Boxes,
        flips: NDArray[np.bool_],
        sizes: NDArray[np.int64],
        size: tuple[int, int],
        firsts: NDArray[np.int64],
        mode: str,
    ) -> Targets:
        """Returns the targets of the images that `Batch.placed` makes. Boxes are clipped to their own images."""
        shown = (outside_places(firsts[:, i], sizes[:, i], size[i], mode) for i in range(2))
        rows, columns = self._sources(boxes, flips, sizes, *shown)
        shift = np.tile(np.eye(3), (len(flips), 1, 1))
        shift[:, :2, 2] = -firsts[:, ::-1]
        matrix = crop_matrices(boxes, flips, sizes)
        cropped = {name: boxes_through(some, matrix, sizes.T) for name, some in self.boxes.items()}
        return replace(self, boxes=cropped)._moved(size, rows, columns, [shift], ())

    def _sources(
        self,
        boxes: Boxes,
        flips: NDArray[np.bool_],
        sizes: NDArray[np.int64],
        down: NDArray[np.int64],
        across: NDArray[np.int64],
    ) -> tuple[Places, Places]:
        """Returns the rows and columns of masks that rows `down` and columns `across` of resized images show."""
        across = np.where(flips[:, None] & (across >= 0), sizes[:, 1:] - 1 - across, across)
        rows = nearest_places(boxes.tops, boxes.heights, sizes[:, 0], self.size[0], down)
        return rows, nearest_places(boxes.lefts, boxes.widths, sizes[:, 1], self.size[1], across)

    def _moved(
        self, size: tuple[int, int], rows: Places | None, columns: Places | None, matrices: list[Floats], moving: Steps
    ) -> Targets:
        """Returns targets of images of `size`, which show `rows` and `columns` (None: all) after the steps `moving`.

        `matrices` map boxes before the steps.
        """
        boxes = dict(self.boxes)
        for some in matrices:
            boxes = {name: boxes_through(tensor, some, size) for name, tensor in boxes.items()}
        for step in moving if boxes else ():
            # What stays where it is keeps its boxes, whatever other images do: small boxes would be removed.
            moves = to_device(torch.from_numpy(step.codes != Op.NOTHING), next(iter(boxes.values())).device)
            some = step_matrices(step, size)
            boxes = {
                name: torch.where(moves[:, None, None], boxes_through(tensor, some, size), tensor)
                for name, tensor in boxes.items()
            }
        masks = {}
        for name, mask in self.masks.items():
            kept = mask.detach().view(_BYTES[mask.element_size()])
            fill = torch.full((1,), self.fills[name], dtype=mask.dtype, device="cpu").view(kept.dtype)
            if rows is not None and columns is not None:
                kept = taken(kept, rows, columns, fill)
            if moving:
                kept = _stepped(kept.clone() if rows is None else kept, moving, fill)
            masks[name] = kept.view(mask.dtype)
        return replace(self, size=size, masks=masks, boxes=boxes)

    @staticmethod
    def chosen(alternatives: Sequence[Targets], numbers: Tensor) -> Targets:
        """Returns targets that take the masks and boxes of image i from `alternatives[numbers[i]]`."""
        first = alternatives[0]
        masks, boxes = dict(first.masks), dict(first.boxes)
        for number, other in enumerate(alternatives[1:], start=1):
            for mine, theirs in ((masks, other.masks), (boxes, other.boxes)):
                for name, tensor in theirs.items():
                    chosen, bits = (numbers == number).view(-1, *[1] * (tensor.ndim - 1)), _BYTES[tensor.element_size()]
                    mine[name] = torch.where(chosen, tensor.view(bits), mine[name].view(bits)).view(tensor.dtype)
        return replace(first, masks=masks, boxes=boxes)

    def keeping(self, kept: Mapping[str, NDArray[np.bool_]]) -> Targets:
        """Returns the targets without the boxes for which `kept`, (B, K) by name, is false."""
        boxes = dict(self.boxes)
        for name, rows in kept.items():
            boxes[name] = boxes[name].clone()
            boxes[name][~to_device(torch.from_numpy(rows), boxes[name].device)] = boxes[name].new_tensor(
                [0, 0, 0, 0, -1]
            )
        return replace(self, boxes=boxes)

    def arrays(self) -> dict[str, Tensor]:
        """Returns masks and boxes by name, boxes as float32 (B, K, 5)."""
        return {**self.masks, **{name: settled(some, self.size).float() for name, some in self.boxes.items()}}


def taken(mask: Tensor, rows: Places, columns: Places, fill: Tensor) -> Tensor:
    """Returns a mask of the given rows and columns of `mask`, with `fill`, (1,), where a row or column is -1."""
    count, has_outside = len(mask), min(rows.min(initial=0), columns.min(initial=0)) < 0
    rows, columns = (np.broadcast_to(places, (count, places.shape[1])) for places in (rows, columns))
    if mask.device.type != "cpu":
        down, across = (to_device(torch.from_numpy(np.array(places)), mask.device).long() for places in (rows, columns))
        down, across = down[:, :, None], across[:, None, :]
        numbers = torch.arange(count, device=mask.device)[:, None, None]
        taken = mask[numbers, down.clamp(min=0), across.clamp(min=0)]
        if not has_outside:
            return taken
        outside = ((down < 0) | (across < 0)).view(*taken.shape[:3], *[1] * (mask.ndim - 3))
        return torch.where(outside, to_device(fill, mask.device), taken)
    # On the CPU, NumPy takes a third of the time.
    pixels, level = mask.numpy(), fill.numpy()
    out = np.empty((count, rows.shape[1], columns.shape[1], *pixels.shape[3:]), pixels.dtype)

    def work(some: slice) -> None:
        for to, picture, down, across in zip(out[some], pixels[some], rows[some], columns[some], strict=True):
            to[:] = picture.take(down, axis=0).take(across, axis=1)
            if has_outside:
                to[down < 0] = level
                to[:, across < 0] = level

    in_slices(count, work)
    return torch.from_numpy(out)


def _stepped(mask: Tensor, steps: Steps, fill: Tensor) -> Tensor:
    """Returns a mask after steps, with `fill`, (1,), outside of the image. May change `mask` in place."""
    picture = (mask if mask.ndim == 4 else mask[..., None]).contiguous().view(torch.uint8)
    levels = fill.view(torch.uint8).tolist() * (picture.shape[3] // fill.element_size())
    parts = []
    for first in range(0, picture.shape[3], _CHANNELS):
        some = slice(first, first + _CHANNELS)
        colour = np.tile(np.array(levels[some], np.float64), (len(mask), 1))
        filled = [replace(step, values=np.concatenate([step.values, colour], axis=1)) for step in steps]
        parts.append(run_steps(picture[..., some].permute(0, 3, 1, 2), tuple(filled)).permute(0, 2, 3, 1))
    changed = parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)
    return changed.contiguous().view(mask.dtype).view(mask.shape)


def _moving(step: Step) -> Step:
    """Returns the step for masks: only operations that move pixels, by nearest neighbor, without fill values."""
    values = step.values[:, :FILL_AT].copy()
    values[:, SAMPLING_AT] = Sampling.NEAREST
    return replace(step.where(np.isin(step.codes, MOVES)), values=values)


def _checked(kind: str, tensors: object, images: Tensor) -> dict[str, Tensor]:
    """Returns the tensors as a dict by name, empty for None.

    Raises TypeError unless they are a mapping of names to tensors, and ValueError for another device than the images'.
    """
    if tensors is None:
        return {}
    if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
        raise TypeError(f"{kind} must be a mapping of names to tensors; found {tensors!r:.200}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{kind}[{name!r}] must be a tensor; found {type(tensor).__name__}")
        if tensor.device != images.device:
            raise ValueError(f"{kind}[{name!r}] must be on {images.device}, like the images; found {tensor.device}")
    return dict(tensors)


def check_mask_fill(mask_fill: MaskFill | Sequence[tuple[str, float]]) -> float | dict[str, float]:
    """Returns `mask_fill` as a number, or a dict of numbers by name. Raises TypeError if it is something else."""
    if isinstance(mask_fill, str) or not isinstance(mask_fill, Mapping | Sequence):
        check_number("mask_fill", mask_fill)
        return mask_fill
    fills = dict(mask_fill)
    for name, fill in fills.items():
        check_number(f"mask_fill[{name!r}]", fill)
    return fills


def _fills(masks: Mapping[str, Tensor], mask_fill: MaskFill) -> dict[str, float]:
    """Returns the fill of each mask by name. Raises ValueError if a mask's dtype cannot hold its fill."""
    found = check_mask_fill(mask_fill)
    if isinstance(found, dict):
        if unknown := [name for name in found if masks and name not in masks]:
            raise ValueError(f"mask_fill must have names of masks only, {sorted(masks)}; found {unknown}")
        fills = {name: found.get(name, 0) for name in masks}
    else:
        fills = dict.fromkeys(masks, found)
    for name, fill in fills.items():
        if not _holds(masks[name].dtype, fill):
            raise ValueError(
                f"mask_fill must be a number that masks[{name!r}], {masks[name].dtype}, can hold; found {fill!r}: pass "
                "a dict {name: number} for masks of several dtypes"
            )
    return fills


def _holds(dtype: torch.dtype, number: float) -> bool:
    if dtype is torch.bool:
        return number in (0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        largest = torch.finfo(dtype).max
        return not np.isfinite(number) or -largest <= number <= largest
    limits = torch.iinfo(dtype)
    return limits.min <= number <= limits.max and number == int(number)
