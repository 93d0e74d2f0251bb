"""Options of a ShardLoader that say how samples are read, checked before a set is opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from shardio.format.layout import SampleShape
from shardio.loading.out import check_out
from shardio.loading.parts import Parts, as_names, find_parts
from shardio.loading.reporter import To
from shardio.loading.transform import Function
from shardio.order.orders import as_integer
from shardio.order.windows import Crop, CropAt
from shardio.reading.choose import Io, check_io
from shardio.reading.layout import SplitLayout

Check = Literal["off", "sample"]
OnDamage = Literal["raise", "skip"]
Where = Literal["device"]


@dataclass(frozen=True)
class Options:
    """The arguments of these names of `shardio.loading.loader.ShardLoader`, checked as far as that needs no set."""

    seed: int
    prefetch: int
    num_threads: int | None
    io: Io
    crop: int | tuple[int, int] | None
    crop_at: CropAt
    check: Check
    on_damage: OnDamage
    transform: Function | None
    arrays: Sequence[str] = ()
    columns: Sequence[str] = ()
    images_from: str | None = None
    report_every: float | None = None
    report_to: To | None = None
    out: Sequence[Any] | None = None
    resident: Where | None = None
    roi: bool = True

    def __post_init__(self) -> None:
        check_io(self.io)
        for name, value, choices in (
            ("check", self.check, get_args(Check)),
            ("on_damage", self.on_damage, get_args(OnDamage)),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}; found {value!r}")
        if self.resident not in (None, *get_args(Where)):
            raise ValueError(f'resident must be "device" or None; found {self.resident!r}')
        for name in ("seed", "prefetch", "num_threads"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, as_integer(name, value))
        if (self.num_threads is not None and self.num_threads < 1) or self.prefetch < 0:
            found = f"{self.num_threads}, {self.prefetch}"
            raise ValueError(f"num_threads must be at least 1 and prefetch at least 0; found {found}")
        if self.transform is not None and not callable(self.transform):
            raise TypeError(
                f"transform must be from shardio.augment, or a function of a batch of images; found {self.transform!r}"
            )
        every = self.report_every
        if every is not None and (isinstance(every, bool) or not isinstance(every, (int, float)) or not every > 0):
            raise ValueError(f"report_every must be seconds above 0, or None; found {every!r}")
        if self.report_to is not None and not callable(self.report_to):
            raise TypeError(f"report_to must be something to call with each report; found {self.report_to!r}")
        if self.report_to is not None and every is None:
            raise ValueError("report_to needs report_every=, the seconds from one report to the next")
        check_out(self.out)
        if not isinstance(self.roi, bool):
            raise TypeError(f"roi must be True or False; found {self.roi!r}")
        for name in ("arrays", "columns"):
            object.__setattr__(self, name, as_names(name, getattr(self, name)))

    def parts_of(self, layout: SplitLayout) -> Parts:
        """Returns what a batch holds of each sample. Raises ValueError if the split does not have it."""
        return find_parts(layout, self.arrays, self.columns, self.images_from)

    def crop_of(self, shape: SampleShape) -> Crop | None:
        """Returns the crop of samples of this shape. Raises ValueError if they are too small for it."""
        if self.crop is None:
            return None
        sides = self.crop if isinstance(self.crop, (tuple, list)) else (self.crop, self.crop)
        if len(sides) != 2:
            raise ValueError(f"crop must be an integer or (height, width); found {self.crop!r}")
        height, width = (as_integer("crop", side) for side in sides)
        return Crop(height, width, self.crop_at, self.seed, shape)
