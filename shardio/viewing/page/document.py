"""The whole page: the sections, the table of classes as data for the script, and what may run in it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardio.format.manifest import Manifest
from shardio.viewing.facts import Facts
from shardio.viewing.gallery import Shown
from shardio.viewing.page import sections
from shardio.viewing.page.html import Html, foreign, joined, shortened, tag
from shardio.viewing.page.sections import Looks, Refused
from shardio.viewing.repeats import Member
from shardio.viewing.statistics import ClassCount

# Rows of the table and characters in them: a page of a million classes is nothing that anybody would read.
_MOST_ROWS = 20_000
_MOST_ROWS_NBYTES = 2_500_000
_HERE = Path(__file__).parent


def make_page(
    name: str,
    facts: Facts,
    listed: Sequence[ClassCount],
    gallery: Mapping[int, Sequence[Shown]],
    keys: Mapping[int, str],
    looks: Mapping[Member, Looks],
    refused: Sequence[Refused],
    source_given: bool,
) -> bytes:
    """Returns the page about the set `name`.

    `listed` are the classes that the table shall have, as far as there is room. `gallery` has thumbnails of the first
    split's classes by label, `keys` the keys of these samples, and `looks` how the samples of repeats are shown.
    `refused` are all refused images.
    """
    rows = _rows(facts.manifest, listed, gallery, keys)
    data = {"splits": [shortened(split.name, 30) for split in facts.splits], "classes": rows}
    parts = (
        sections.classes(facts, len(rows), sum(1 for row in rows if row[-1])),
        sections.sizes(facts),
        sections.resizing(facts),
        sections.pixels(facts),
        sections.repeats(facts, looks),
        sections.refused(refused, facts.manifest.rejects.num_rejects, source_given),
        sections.made(facts.manifest),
    )
    titles = ("Classes", "Sizes", "Resizing", "Pixels", "Repeats", "Refused", "Made")
    links = [tag("a", title, href=f"#{title.lower()}") for title in titles]
    header = tag(
        "header",
        tag("h1", foreign(name)),
        tag("p", "digest ", tag("code", facts.manifest.digest), class_="note"),
        tag("nav", *links, tag("button", "Dark", id="theme", type="button", hidden=""), aria_label="Sections"),
    )
    body = joined(header, tag("main", sections.tiles(facts), *parts))
    return _document(f"{shortened(name)}: shardio report", body, data)


def _document(title: str, body: Html, data: Mapping[str, Any]) -> bytes:
    style, script = (Html((_HERE / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}"
    head = joined(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", style),
    )
    scripts = joined(tag("script", _json(data), type="application/json", id="data"), tag("script", script))
    page = tag("html", tag("head", head), tag("body", body, scripts), lang="en")
    return f"<!doctype html>\n{page}\n".encode()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(data: Mapping[str, Any]) -> Html:
    """Returns JSON that can end no element, and begin no comment."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return Html(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _rows(
    manifest: Manifest, listed: Sequence[ClassCount], gallery: Mapping[int, Sequence[Shown]], keys: Mapping[int, str]
) -> list[list[Any]]:
    """Returns [label, name, what people call it, the counts of each split, [[index, key, picture], ...]] of classes."""
    rows = []
    nbytes = 0
    names, called = manifest.classes, manifest.class_names
    for one in listed:
        label = one.label
        texts = [shortened(some[label], 80) if 0 <= label < len(some) else "" for some in (names, called)]
        shown = [[some.index, shortened(keys[some.index], 100), some.picture] for some in gallery.get(label, ())]
        nbytes += len("".join([*texts, *(str(some[1]) for some in shown)]).encode())
        if nbytes > _MOST_ROWS_NBYTES:
            break
        # JavaScript has no integers beyond 2**53.
        rows.append([label if abs(label) < 1 << 53 else str(label), *texts, list(one.counts), shown])
    return rows


def listed_classes(classes: Sequence[ClassCount]) -> Sequence[ClassCount]:
    """Returns the classes; of too many, the smallest and the largest, in the order of their labels."""
    if len(classes) <= _MOST_ROWS:
        return classes
    ordered = sorted(classes, key=lambda one: sum(one.counts))
    half = _MOST_ROWS // 2
    return sorted([*ordered[:half], *ordered[-half:]], key=lambda one: one.label)
