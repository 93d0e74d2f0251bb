"""What `shardio bench` measured, as lines for a person to read: options that were not swept stand above the table."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardio.measure.bench import LimitKind, LimitResult, Report, Speed
from shardio.measure.limits import DIRECT_THREADS

# Above the columns of ratios. To one buffer there is none: its worth is to show what the slots' alignment is worth.
_RATIOS: dict[LimitKind, str] = {
    "memcpy": "memcpy",
    "take": "take",
    "direct": "direct",
    "pinned_copy": "pinned",
}
_WIDTH = 100
_LEFT_OUT: dict[LimitKind, str] = {"direct": "O_DIRECT reads"}


class _Column(NamedTuple):
    """Its header has two lines."""

    above: str
    title: str
    cells: list[str]


def table(report: Report) -> list[str]:
    """Lines of at most 100 characters, if the set's path is not long."""
    return [*_about(report), "", *_limits(report), "", *_loaders(report)]


def _about(report: Report) -> Iterator[str]:
    shape, machine = " x ".join(map(str, report.sample_shape)), report.machine
    cached = "" if report.resident_share is None else f", {report.resident_share:.0%} in the page cache before"
    yield f"{report.path}, {report.split}: {report.num_samples:,} samples of {shape} on {machine['filesystem']}{cached}"
    devices = "".join(f", {device}: {name}" for device, name in machine["devices"].items())
    rounds = f"medians of {report.rounds} round{'s' * (report.rounds > 1)}, {report.seconds:g} s each"
    yield f"{machine['cores']} cores, kernel {machine['kernel']}{devices}; {rounds}"


def _limits(report: Report) -> Iterator[str]:
    yield from _joined(
        [_Column("", "limit", [_name(limit) for limit in report.limits])],
        _speeds([limit.speed for limit in report.limits]),
    )
    for kind, why in report.left_out.items():
        yield f"left out: {_LEFT_OUT[kind]}: {why}"


def _name(limit: LimitResult) -> str:
    batch = f"batch {limit.batch_size}"
    if limit.image_shape is not None:
        batch += f" of {limit.image_shape[0]}x{limit.image_shape[1]}"
    return {
        "memcpy": "memcpy of one large block",
        "take": f"np.take into slots, {batch}",
        "take_one_buffer": f"np.take into one buffer, {batch}",
        "direct": f"O_DIRECT reads, {DIRECT_THREADS} threads",
        "pinned_copy": f"pinned copy to {limit.device}, {batch}",
    }[limit.kind]


def _loaders(report: Report) -> Iterator[str]:
    loaders = report.loaders
    combinations = [loader.combination for loader in loaders]
    options = [
        _Column("", "device", [options.device for options in combinations]),
        _Column("", "crop", [_crop(options.crop) for options in combinations]),
        _Column("", "batch", [str(options.batch_size) for options in combinations]),
        _Column("", "io", [options.io for options in combinations]),
        _Column("", "threads", [str(options.num_threads) for options in combinations]),
        _Column("pre-", "fetch", [str(options.prefetch) for options in combinations]),
    ]
    swept = [option for option in options if len(set(option.cells)) > 1]
    fixed = [f"{above.rstrip('-')}{title} {cells[0]}" for above, title, cells in options if len(set(cells)) == 1]
    yield f"ShardLoader: {', '.join(fixed)}" if fixed else "ShardLoader"
    firsts = [f"{statistics.median(loader.first_batch_seconds) * 1000:.0f}" for loader in loaders]
    first = _Column("first", "ms", firsts)
    yield from _joined(swept, [*_speeds([loader.speed for loader in loaders]), first, *_ratios(report)])
    yield "ratios are of GB/s; first: from opening the set to the first batch"
    if any(loader.combination.crop for loader in loaders):
        yield "of a crop, GB/s are those of its windows; memcpy, np.take and O_DIRECT move whole samples"
    chosen = {loader.engine: loader.io_reason for loader in loaders if loader.combination.io == "auto"}
    yield from (f"io auto is {engine} here: {reason}" for engine, reason in chosen.items())


def _crop(crop: tuple[int, int] | None) -> str:
    return "none" if crop is None else f"{crop[0]}x{crop[1]}"


def _speeds(speeds: Sequence[Speed]) -> list[_Column]:
    return [
        _Column("", "images/s", [f"{speed.images_per_second:,.0f}" for speed in speeds]),
        _Column("", "GB/s", [_short(speed.gigabytes_per_second) for speed in speeds]),
        _Column("CPU us", "/image", [_short(speed.cpu_microseconds_per_image) for speed in speeds]),
    ]


def _ratios(report: Report) -> list[_Column]:
    rows = [report.ratios(loader) for loader in report.loaders]
    measured = {kind: title for kind, title in _RATIOS.items() if any(kind in row for row in rows)}
    return [
        _Column("over", title, [_short(row[kind]) if kind in row else "-" for row in rows])
        for kind, title in measured.items()
    ]


def _joined(left: Sequence[_Column], right: Sequence[_Column]) -> list[str]:
    columns = []
    for side, justify in ((left, str.ljust), (right, str.rjust)):
        for above, title, cells in side:
            width = max(map(len, (above, title, *cells)))
            columns.append([justify(text, width) for text in (above, title, *cells)])
    gap = 2 if sum(len(texts[0]) + 2 for texts in columns) <= _WIDTH else 1
    return [(" " * gap).join(texts).rstrip() for texts in zip(*columns, strict=True)]


def _short(value: float) -> str:
    """Three digits, more or less."""
    decimals = next((count for count, least in enumerate((100, 10, 0.1)) if value >= least), 3)
    return f"{value:,.{decimals}f}"
