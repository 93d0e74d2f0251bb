"""The results of `bench`: speeds of loaders, speeds of limits, and ratios of speeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardio.format.layout import SampleShape
from shardio.reading.choose import Io

LimitKind = Literal["memcpy", "take", "direct", "pinned_copy"]

# Arguments that gain less than this over the default are not worth writing down, and a thread that gains less is not
# worth its core.
_WORTH_AN_ARGUMENT = 1.05
_WORTH_A_THREAD = 1.02


@dataclass(frozen=True)
class Combination:
    """One combination of values for arguments of ShardLoader, with the names of the arguments."""

    device: str
    batch_size: int
    io: Io
    num_threads: int | None
    prefetch: int


@dataclass
class Speed:
    """The speed of one way to move images: seconds per image, measured once per round."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    """CPU seconds of the whole process per image, measured once per round."""

    @property
    def images_per_second(self) -> float:
        """The median over the rounds."""
        return 1 / statistics.median(self.seconds)

    @property
    def cpu_microseconds_per_image(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.cpu_seconds) * 1e6

    def ratio_to(self, other: Speed) -> float:
        """Returns the median over the rounds of the ratio of this speed to `other`."""
        return statistics.median(theirs / ours for ours, theirs in zip(self.seconds, other.seconds, strict=True))


@dataclass(frozen=True)
class LoaderSpeed:
    """The speed of a loader, with the number of threads and the device that it chose itself."""

    combination: Combination
    engine: str
    io_reason: str
    speed: Speed = field(default_factory=Speed)
    first_batch_seconds: list[float] = field(default_factory=list)
    """Seconds from opening the set to receiving the first batch, measured once per round."""


@dataclass(frozen=True)
class LimitSpeed:
    """The speed of a limit, such as memcpy, for loaders with this batch size and device. None stands for any."""

    kind: LimitKind
    batch_size: int | None = None
    device: str | None = None
    speed: Speed = field(default_factory=Speed)

    def bounds(self, loader: LoaderSpeed) -> bool:
        """Whether the limit applies to the loader."""
        options = loader.combination
        return self.batch_size in (None, options.batch_size) and self.device in (None, options.device)


@dataclass(frozen=True)
class BenchResult:
    """All speeds, and facts about the set and the machine that were measured."""

    path: str
    split: str
    digest: str
    num_samples: int
    sample_shape: SampleShape | tuple[int]
    """(height, width, channels); of samples without pixels, (bytes of a sample,)."""
    resident_share: float | None
    """The share of the split that was in the page cache before the benchmark; None if unknown."""
    machine: dict[str, Any]
    rounds: int
    seconds: float
    limits: list[LimitSpeed]
    left_out: dict[LimitKind, str]
    """The reason for each limit that cannot be measured here."""
    loaders: list[LoaderSpeed]
    mix: Mapping[str, str] = field(default_factory=dict)
    """The shares of other sets that the loaders mix with this one, whose share is 1."""

    def gigabytes_per_second(self, speed: Speed) -> float:
        """Returns the speed in gigabytes per second, counting the stored bytes of the samples."""
        return speed.images_per_second * math.prod(self.sample_shape) / 1e9

    def ratios(self, loader: LoaderSpeed) -> dict[LimitKind, float]:
        """Returns the ratio of this loader's speed to each limit that applies to it."""
        return {limit.kind: loader.speed.ratio_to(limit.speed) for limit in self.limits if limit.bounds(loader)}

    def fastest(self) -> tuple[LoaderSpeed, float]:
        """Returns the loader worth choosing, and its speed relative to the first loader, which has the defaults.

        The first loader is chosen unless another loader is clearly faster. Among loaders that are about as fast, the
        loader with the fewest threads is chosen.
        """
        default = self.loaders[0]
        gains = [(loader.speed.ratio_to(default.speed), loader) for loader in self.loaders]
        best = max(gain for gain, _ in gains)
        if best < _WORTH_AN_ARGUMENT:
            return default, 1.0
        near = [(gain, loader) for gain, loader in gains if gain * _WORTH_A_THREAD >= best]
        gain, chosen = min(near, key=lambda one: (one[1].combination.num_threads or 0, one[1].combination.prefetch))
        return chosen, gain

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as JSON values."""
        limits = [
            {"kind": limit.kind, "batch_size": limit.batch_size, "device": limit.device, **self._figures(limit.speed)}
            for limit in self.limits
        ]
        loaders = [
            {
                **vars(loader.combination),
                "engine": loader.engine,
                "io_reason": loader.io_reason,
                **self._figures(loader.speed),
                "first_batch_seconds": _rounded(statistics.median(loader.first_batch_seconds)),
                "ratios": {kind: _rounded(ratio) for kind, ratio in self.ratios(loader).items()},
            }
            for loader in self.loaders
        ]
        return {**vars(self), "limits": limits, "loaders": loaders}

    def _figures(self, speed: Speed) -> dict[str, Any]:
        return {
            "images_per_second": _rounded(speed.images_per_second),
            "images_per_second_range": [_rounded(1 / bound(speed.seconds)) for bound in (max, min)],
            "gigabytes_per_second": _rounded(self.gigabytes_per_second(speed)),
            "cpu_microseconds_per_image": _rounded(speed.cpu_microseconds_per_image),
        }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
