"""The sections of the page, each a function from facts to HTML. What needs a script is only named here."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardio.errors import shortened
from shardio.format.manifest import Manifest
from shardio.system.amounts import bytes_text, counted
from shardio.viewing.facts import Facts
from shardio.viewing.page.charts import histogram, percent
from shardio.viewing.page.html import Child, Html, foreign, joined, tag
from shardio.viewing.repeats import Group, Member

# A page is to be read: of longer lists it has the first, and says how many there are.
_MOST_FACTS = 300
_MOST_TEXT = 20_000
MOST_GROUPS = 60
MOST_MEMBERS = 6
MOST_REFUSED = 200


@dataclass(frozen=True)
class Refused:
    """An image that a conversion refused. `picture` is a data URL, or None."""

    split: str
    key: str
    reason: str
    detail: str
    picture: str | None = None


@dataclass(frozen=True)
class Looks:
    """How a sample of a group is shown."""

    name: str
    """The name of its class, for people."""
    key: str
    picture: str


def section(name: str, title: str, *children: Child) -> Html:
    return tag("section", tag("h2", title, id=name), *children, aria_labelledby=name)


def paragraph(*children: Child, class_: str | None = None) -> Html:
    return tag("p", *children, class_=class_)


def figures(*children: Html) -> Html:
    return tag("div", *children, class_="figures") if any(children) else Html("")


def tiles(facts: Facts) -> Html:
    manifest = facts.manifest
    height, width, channels = manifest.sample_shape
    splits = ", ".join(f"{split.name} {split.num_samples:,}" for split in facts.splits)
    told = [
        ("Samples", f"{facts.num_samples:,}", splits),
        ("Classes", f"{len(facts.classes):,}", ""),
        ("Shape", f"{height} x {width} x {channels}", "height, width, channels; uint8"),
        ("Size", bytes_text(manifest.nbytes), counted(len(manifest.files) + 1, "file")),
        ("Refused", f"{manifest.rejects.num_rejects:,}", "images, when it was made"),
    ]
    return tag(
        "dl",
        *(
            tag("div", tag("dt", name), tag("dd", value, tag("small", foreign(note)) if note else ""))
            for name, value, note in told
        ),
        class_="tiles",
    )


def made(manifest: Manifest) -> Html:
    """How the set was made: what its provenance tells, whatever that is."""
    told = list(_flat(manifest.provenance))
    rows = [
        tag("div", tag("dt", foreign(name, 80)), tag("dd", foreign(value, 300))) for name, value in told[:_MOST_FACTS]
    ]
    more = [paragraph(f"{len(told) - _MOST_FACTS:,} facts more are in manifest.json.")] if len(told) > len(rows) else []
    return section("made", "How it was made", _changes(manifest.provenance), tag("dl", *rows, class_="facts"), *more)


def _changes(provenance: Mapping[str, Any]) -> Html:
    """The operations that made the set of others, the earliest first."""
    earlier = provenance.get("earlier")
    steps = [*(earlier if isinstance(earlier, list) else []), provenance.get("change")]
    names = [str(step.get("operation")) for step in steps if isinstance(step, dict)]
    if not names:
        return Html("")
    return paragraph("Changes, the last one last: ", joined(*_separated([foreign(name, 40) for name in names], " → ")))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value if isinstance(value, str) else json.dumps(value)[:_MOST_TEXT]


def classes(facts: Facts, num_listed: int, num_shown: int) -> Html:
    """The class counts, and the place of the table that the script fills."""
    total = len(facts.classes)
    empty = sum(1 for one in facts.classes if not any(one.counts))
    words = [counted(total, "class")]
    words += [f"{empty:,} of them without a sample"] if empty else []
    told = ", ".join(words) + "."
    if num_listed < total:
        told += f" The table has {num_listed:,} of them: the smallest and the largest."
    if num_shown < total:
        told += f" Pictures are shown of {num_shown:,}."
    search = tag(
        "label",
        "Search ",
        tag("input", type="search", id="search", autocomplete="off", placeholder="name, label or key"),
    )
    return section(
        "classes",
        "Classes",
        paragraph(told),
        figures(*(histogram(f"{split.name}: samples of a class", split.per_class) for split in facts.splits)),
        tag(
            "div",
            tag(
                "div",
                search,
                tag("label", tag("input", type="checkbox", id="pictures"), " Pictures"),
                class_="controls",
            ),
            tag("div", id="table"),
            tag("nav", id="pages", aria_label="Pages of classes"),
            id="browser",
            hidden="",
        ),
        tag("noscript", paragraph("The table of classes and their pictures need JavaScript.")),
    )


def sizes(facts: Facts) -> Html:
    charts = [
        chart
        for split in facts.splits
        for chart in (
            histogram(f"{split.name}: width", split.widths),
            histogram(f"{split.name}: height", split.heights),
            histogram(f"{split.name}: width ÷ height", split.aspects),
        )
    ]
    told = "The sizes of the original images, of all samples. The axes are logarithmic."
    return section("sizes", "Original sizes", paragraph(told if any(charts) else "The set has none."), figures(*charts))


def resizing(facts: Facts) -> Html:
    losses = [(split, split.loss) for split in facts.splits if split.loss is not None]
    if not losses:
        told = "Not known: the set does not tell how its pictures were resized, or not all in the same way."
        return section("resizing", "What resizing has lost", paragraph(told))
    what = {
        "crop": "The short side became that of the sample, and what is beyond it on the other side was cut away.",
        "pad": "The long side became that of the sample, and black margins fill the rest.",
        "squash": "Both sides became those of the sample: the aspect ratio is lost, and no part is cut away.",
    }
    share = {"crop": "cut away of each picture", "pad": "margins in each sample", "squash": ""}
    children: list[Child] = [paragraph(what[losses[0][1].fit])]
    children += [
        paragraph(
            tag("b", foreign(split.name)),
            f": {loss.num_enlarged:,} of {loss.reduction.total:,} pictures "
            f"({percent(loss.num_enlarged / loss.reduction.total)}) were enlarged: their factor is below 1.",
        )
        for split, loss in losses
    ]
    charts = [
        chart
        for split, loss in losses
        for chart in (
            histogram(f"{split.name}: {share[loss.fit]}", loss.share, percent),
            histogram(f"{split.name}: factor of reduction", loss.reduction),
        )
    ]
    return section("resizing", "What resizing has lost", *children, figures(*charts))


def normalize_lines(facts: Facts) -> str:
    """Returns the lines to be pasted into a training script."""
    mean, std = (", ".join(f"{n:.4f}" for n in numbers) for numbers in (facts.levels.mean, facts.levels.std))
    comma = "," if len(facts.levels.mean) == 1 else ""
    return f"from shardio.augment import Normalize\nNormalize(mean=({mean}{comma}), std=({std}{comma}))"


def pixels(facts: Facts) -> Html:
    levels = facts.levels
    names = ("red", "green", "blue") if len(levels.mean) == 3 else tuple(map(str, range(len(levels.mean))))
    rows = [
        tag("tr", tag("th", name, scope="row"), tag("td", f"{mean:.4f}"), tag("td", f"{std:.4f}"))
        for name, mean, std in list(zip(names, levels.mean, levels.std, strict=True))[:_MOST_FACTS]
    ]
    told = (
        f"Mean and standard deviation of {levels.num_samples:,} samples of ",
        tag("b", foreign(levels.split)),
        ", from 0 for black to 1 for white",
        ", as the manifest has them:" if facts.levels_are_stored else ":",
    )
    head = tag("tr", *(tag("th", name, scope="col") for name in ("channel", "mean", "std")))
    return section(
        "pixels",
        "Pixels",
        paragraph(*told),
        tag("table", tag("thead", head), tag("tbody", *rows), class_="numbers"),
        tag("pre", tag("code", *_lines(normalize_lines(facts)))),
        paragraph(f"The brightness of {facts.num_seen:,} pictures is the mean of their greys."),
        figures(*(histogram(f"{split.name}: brightness", split.brightness) for split in facts.splits)),
    )


def repeats(facts: Facts, looks: Mapping[Member, Looks]) -> Html:
    found = facts.repeats
    conflicts = sum(group.labels_differ for group in found.groups)
    across = sum(group.splits_differ for group in found.groups)
    equal = sum(group.equal for group in found.groups)
    told = [
        paragraph(
            tag("b", f"{len(found.groups):,} group{'s' * (len(found.groups) != 1)}"),
            f" of repeated pictures: {equal:,} of equal ones, {len(found.groups) - equal:,} of pictures that look "
            f"alike. {conflicts:,} have different labels, {across:,} lie in more than one split.",
        ),
        paragraph(
            f"Equal pictures were searched among all {facts.num_samples:,} samples by their crc32, and then compared. "
            f"Pictures that look alike were searched among {facts.num_seen:,}, by a hash of 64 bits of each (dHash), "
            "of which at most 3 may differ, and then compared in 16 x 16 fields.",
            class_="note",
        ),
    ]
    if found.num_not_compared:
        told.append(paragraph(f"{found.num_not_compared:,} that may be equal or alike were too many to be compared."))
    if found.keys:
        first = [
            tag("li", foreign(looks[group.members[0]].key), ": ", ", ".join(_number(one) for one in group.members[:20]))
            for group in found.keys[:MOST_GROUPS]
        ]
        told.append(paragraph(f"{len(found.keys):,} keys have samples under different labels:"))
        told.append(tag("ul", *first))
    if len(found.groups) > MOST_GROUPS:
        told.append(paragraph(f"The first {MOST_GROUPS} groups:"))
    groups = [_group(group, looks) for group in found.groups[:MOST_GROUPS]]
    return section("repeats", "Repeated pictures", *told, tag("ul", *groups, class_="groups") if groups else "")


def _group(group: Group, looks: Mapping[Member, Looks]) -> Html:
    marks = ["equal" if group.equal else "alike"]
    marks += ["different labels"] if group.labels_differ else []
    marks += ["different splits"] if group.splits_differ else []
    more = len(group.members) - MOST_MEMBERS
    return tag(
        "li",
        tag("div", *_separated([tag("span", mark, class_="mark") for mark in marks], " ")),
        tag("div", *(_member(member, looks[member]) for member in group.members[:MOST_MEMBERS]), class_="members"),
        paragraph(f"and {more:,} more") if more > 0 else "",
    )


def _member(member: Member, look: Looks) -> Html:
    return tag(
        "figure",
        tag("img", src=look.picture, alt=f"{member.split} {member.index}", loading="lazy"),
        tag("figcaption", foreign(look.name, 40), tag("br"), _number(member), tag("br"), foreign(look.key, 60)),
    )


def _number(member: Member) -> str:
    return f"{shortened(member.split, 20)} {member.index}"


def refused(rejects: Sequence[Refused], num_rejects: int, source_given: bool) -> Html:
    if not num_rejects:
        return section("refused", "Refused images", paragraph("None."))
    reasons = Counter(reject.reason for reject in rejects).most_common(20)
    rows = [
        tag("tr", tag("th", foreign(reason), scope="row"), tag("td", f"{count:,}", class_="right"))
        for reason, count in reasons
    ]
    head = tag("tr", tag("th", "reason", scope="col"), tag("th", "images", scope="col", class_="right"))
    told: list[Child] = [tag("table", tag("thead", head), tag("tbody", *rows), class_="numbers")]
    if not source_given:
        told.append(paragraph("With --source, their pictures are shown, too, as far as they can be decoded."))
    if num_rejects > MOST_REFUSED:
        told.append(paragraph(f"The first {MOST_REFUSED} of {num_rejects:,}:"))
    return section(
        "refused", "Refused images", *told, tag("ul", *map(_refused, rejects[:MOST_REFUSED]), class_="refused")
    )


def _refused(reject: Refused) -> Html:
    picture = tag("img", src=reject.picture, alt="what can be decoded", loading="lazy") if reject.picture else ""
    text = (
        foreign(reject.key, 160),
        tag("br"),
        tag("b", foreign(reject.reason, 40)),
        ": ",
        foreign(reject.detail, 240),
    )
    return tag("li", picture, tag("span", *text))


def _lines(text: str) -> list[Child]:
    return list(_separated([Html(line) for line in text.split("\n")], Html("\n")))


def _separated(parts: Sequence[Child], between: Child) -> Iterator[Child]:
    for place, part in enumerate(parts):
        if place:
            yield between
        yield part
