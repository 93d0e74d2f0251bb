"""Options of a ShardLoader that say how samples are read, checked before a set is opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from shardio.loading.parts import Parts, as_names, find_parts
from shardio.loading.reporter import To
from shardio.loading.transform import Function
from shardio.order.orders import as_integer
from shardio.reading.choose import Io, check_io
from shardio.reading.layout import SplitLayout

Check = Literal["off", "sample"]
OnDamage = Literal["raise", "skip"]


@dataclass(frozen=True)
class Options:
    """The arguments of these names of `shardio.loading.loader.ShardLoader`, checked as far as that needs no set."""

    seed: int
    prefetch: int
    num_threads: int | None
    io: Io
    check: Check
    on_damage: OnDamage
    transform: Function | None
    arrays: Sequence[str] = ()
    columns: Sequence[str] = ()
    report_every: float | None = None
    report_to: To | None = None
    roi: bool = True

    def __post_init__(self) -> None:
        check_io(self.io)
        for name, value, choices in (
            ("check", self.check, get_args(Check)),
            ("on_damage", self.on_damage, get_args(OnDamage)),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}; found {value!r}")
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
        if not isinstance(self.roi, bool):
            raise TypeError(f"roi must be True or False; found {self.roi!r}")
        for name in ("arrays", "columns"):
            object.__setattr__(self, name, as_names(name, getattr(self, name)))

    def parts_of(self, layout: SplitLayout) -> Parts:
        """Returns what a batch holds of each sample. Raises ValueError if the split does not have it."""
        return find_parts(layout, self.arrays, self.columns)
