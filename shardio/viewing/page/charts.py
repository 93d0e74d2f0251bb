"""Histograms as SVG: figures of one size, which a grid puts side by side."""

from __future__ import annotations

from collections.abc import Callable

from shardio.viewing.page.html import Html, joined, tag
from shardio.viewing.statistics import Distribution

_WIDTH, _HEIGHT = 360, 150
_LEFT, _TOP, _BOTTOM = 4, 16, 22

Format = Callable[[float], str]


def number(value: float) -> str:
    """Returns a number with three digits that count."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percent(share: float) -> str:
    return f"{number(100 * share)}%"


def histogram(title: str, told: Distribution | None, format: Format = number) -> Html:
    """Returns a figure; nothing if there are no numbers. Its caption says in words what it shows."""
    if told is None:
        return Html("")
    five = (told.least, told.low, told.median, told.high, told.most)
    names = ("least", "5% below", "median", "5% above", "most")
    summary = ", ".join(f"{name} {format(value)}" for name, value in zip(names, five, strict=True))
    terms = [tag("div", tag("dt", name), tag("dd", format(value))) for name, value in zip(names, five, strict=True)]
    return tag(
        "figure",
        tag("figcaption", title),
        _drawn(f"{title}: {summary}", told, format),
        tag("dl", *terms, class_="five"),
    )


def _drawn(label: str, told: Distribution, format: Format) -> Html:
    highest = max(max(told.counts), 1)
    step = (_WIDTH - 2 * _LEFT) / len(told.counts)
    floor = _HEIGHT - _BOTTOM
    bars = []
    for place, count in enumerate(told.counts):
        if not count:
            continue
        height = max(1.5, (floor - _TOP) * count / highest)
        between = f"{format(told.edges[place])} to {format(told.edges[place + 1])}: {count:,}"
        left, width = _LEFT + place * step, min(max(step - 1, 0.5), 40)
        position = {"x": f"{left + (step - 1 - width) / 2:.1f}", "y": f"{floor - height:.1f}"}
        size = {"width": f"{width:.1f}", "height": f"{height:.1f}"}
        bars.append(tag("rect", tag("title", between), **position, **size))
    ticks = [_tick(_LEFT + place * step, format(told.edges[place])) for place in told.ticks]
    return tag(
        "svg",
        tag("text", f"{highest:,}", x=_LEFT, y=11),
        tag("g", *bars, class_="bars"),
        tag("line", x1=0, x2=_WIDTH, y1=floor, y2=floor),
        joined(*ticks),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=label,
    )


def _tick(x: float, text: str) -> Html:
    anchor = "start" if x < 20 else "end" if x > _WIDTH - 20 else "middle"
    return tag("text", text, x=f"{x:.1f}", y=_HEIGHT - 6, text_anchor=anchor)
