"""The results of `bench` as values: speeds of loaders, speeds of limits, and the ratios between them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, Literal

from shardio.format.layout import SampleShape
from shardio.reading.choose import Io

LimitKind = Literal["memcpy", "take", "take_one_buffer", "direct", "pinned_copy"]


@dataclass(frozen=True)
class Combination:
    """The arguments of ShardLoader that are swept, by their names there."""

    device: str
    batch_size: int
    io: Io
    num_threads: int | None
    prefetch: int


# A way that gains less than this is not worth an argument, and a costlier one that gains less not worth its cost.
_WORTH_AN_ARGUMENT = 1.05
_WORTH_A_THREAD = 1.02


@dataclass
class Speed:
    """The speed of one way to move images. Figures are medians over the rounds."""

    image_nbytes: int
    seconds: list[float] = field(default_factory=list)
    """Wall seconds per image, one per round."""
    cpu_seconds: list[float] = field(default_factory=list)
    """CPU seconds per image of the whole process, one per round."""

    @property
    def images_per_second(self) -> float:
        return 1 / statistics.median(self.seconds)

    @property
    def gigabytes_per_second(self) -> float:
        return self.images_per_second * self.image_nbytes / 1e9

    @property
    def cpu_microseconds_per_image(self) -> float:
        return statistics.median(self.cpu_seconds) * 1e6

    def ratio_to(self, other: Speed) -> float:
        """Returns bytes per second over those of the other way in the same round."""
        rounds = zip(self.seconds, other.seconds, strict=True)
        return statistics.median(theirs / ours for ours, theirs in rounds) * self.image_nbytes / other.image_nbytes

    def to_dict(self) -> dict[str, float]:
        return {
            "images_per_second": _rounded(self.images_per_second),
            "gigabytes_per_second": _rounded(self.gigabytes_per_second),
            "cpu_microseconds_per_image": _rounded(self.cpu_microseconds_per_image),
        }


@dataclass(frozen=True)
class LoaderResult:
    """The result of one combination, with the number of threads and the device that the loader itself found."""

    combination: Combination
    engine: str
    io_reason: str
    image_shape: SampleShape
    """The shape of a delivered image: (height, width, channels)."""
    speed: Speed
    first_batch_seconds: list[float] = field(default_factory=list)
    """Seconds from opening the set to holding the first batch, one figure per round."""


@dataclass(frozen=True)
class LimitResult:
    """A limit of the loaders that have its batch size, image shape and device, where these are not None."""

    kind: LimitKind
    speed: Speed
    batch_size: int | None = None
    image_shape: SampleShape | None = None
    device: str | None = None

    def bounds(self, loader: LoaderResult) -> bool:
        return (
            self.batch_size in (None, loader.combination.batch_size)
            and self.image_shape in (None, loader.image_shape)
            and self.device in (None, loader.combination.device)
        )

    def to_dict(self) -> dict[str, Any]:
        which = {"batch_size": self.batch_size, "image_shape": self.image_shape, "device": self.device}
        return {"kind": self.kind, **which, **self.speed.to_dict()}


@dataclass(frozen=True)
class Report:
    """All figures, with the set and the machine that they are about."""

    path: str
    split: str
    digest: str
    num_samples: int
    sample_shape: SampleShape
    resident_share: float | None
    """The share of the split that was in the page cache before; None if it is unknown."""
    machine: dict[str, Any]
    rounds: int
    seconds: float
    limits: list[LimitResult]
    left_out: dict[LimitKind, str]
    """Limits that cannot be measured here, and why."""
    loaders: list[LoaderResult]

    def ratios(self, loader: LoaderResult) -> dict[LimitKind, float]:
        """Returns the ratio to each limit of this loader that was measured."""
        return {limit.kind: loader.speed.ratio_to(limit.speed) for limit in self.limits if limit.bounds(loader)}

    def fastest(self) -> tuple[LoaderResult, float]:
        """Returns the loader worth choosing and its speed relative to the first one, the default.

        The default wins unless another is clearly faster. Of about equally fast loaders, the one with the fewest
        threads wins.
        """
        default = self.loaders[0]
        gains = [(loader.speed.ratio_to(default.speed), loader) for loader in self.loaders]
        best = max(gain for gain, _ in gains)
        if best < _WORTH_AN_ARGUMENT:
            return default, 1.0
        near = [(gain, loader) for gain, loader in gains if gain * _WORTH_A_THREAD >= best]
        gain, chosen = min(near, key=lambda one: (one[1].combination.num_threads or 0, one[1].combination.prefetch))
        return chosen, gain

    def line(self, chosen: LoaderResult) -> str:
        """Returns the line of Python that makes the chosen loader."""
        default = self.loaders[0].combination
        words = [repr(self.path), f"batch_size={chosen.combination.batch_size}"]
        words += [f"split={self.split!r}"] if self.split != "train" else []
        for name in ("num_threads", "prefetch", "io"):
            value = getattr(chosen.combination, name)
            words += [f"{name}={value!r}"] if value != getattr(default, name) else []
        return f"ShardLoader({', '.join(words)})"

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        loaders = [
            {
                **vars(loader.combination),
                "engine": loader.engine,
                "io_reason": loader.io_reason,
                "image_shape": loader.image_shape,
                **loader.speed.to_dict(),
                "first_batch_seconds": _rounded(statistics.median(loader.first_batch_seconds)),
                "ratios": {kind: _rounded(ratio) for kind, ratio in self.ratios(loader).items()},
            }
            for loader in self.loaders
        ]
        return {**vars(self), "limits": [limit.to_dict() for limit in self.limits], "loaders": loaders}


def _rounded(value: float) -> float:
    """Rounds to the digits that may mean something."""
    return float(f"{value:.4g}")
