"""`shardio report`: one self-contained HTML page about a set.

Names, keys and the provenance are not trusted. The template escapes all text, the script inserts it as text only, and
the Content-Security-Policy has the hashes of the page's style and script, so a browser runs nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from shardio.drawing.sheet import thumbnail
from shardio.errors import bytes_text, counted, printable, shortened
from shardio.format.manifest import Manifest
from shardio.reading.sample import class_text
from shardio.reading.shardset import ShardSet
from shardio.sets.history import flattened
from shardio.sets.levels import Levels
from shardio.viewing.overview import LabelCounts, OnProgress, SetOverview, make_overview
from shardio.viewing.pictures import NO_LABEL, Thumbnail, keys_of, make_gallery, read_pictures
from shardio.viewing.repeats import RepeatedSample

# The page shows the start of longer lists, and says how many there are.
MAX_REFUSED = 200
_MAX_GROUPS = 60
_MAX_OF_GROUP = 6
_MAX_ROWS = 20_000
_MAX_FACTS = 300
_HERE = Path(__file__).parent


RefusedImage = tuple[str, str, str, str | None]
"""(key, reason, detail, thumbnail as a data URL or None) of an image that a conversion refused."""


def make_report(
    splits: Mapping[str, ShardSet],
    *,
    num_pictures: int,
    refused: Sequence[RefusedImage],
    source_given: bool,
    on_progress: OnProgress,
) -> tuple[bytes, SetOverview]:
    """Returns (HTML page about a set, the numbers that the page shows).

    `splits` comes from `open_splits`; `num_pictures` is for `make_overview`. `refused` are the images in the set's
    rejects.jsonl; unless `source_given`, the page says how to show their pictures. Raises the errors of
    `ShardSet.gather`.
    """
    overview = make_overview(splits, num_pictures, on_progress)
    first = next(iter(splits.values()))
    listed = _listed(overview.classes)
    gallery = make_gallery(first, [*listed]) if first.has_pixels else {}
    groups = overview.repeats.groups[:_MAX_GROUPS]
    repeated = [sample for group in groups for sample in group.samples[:_MAX_OF_GROUP]]
    repeated += [group.samples[0] for group in overview.repeats.keys[:_MAX_GROUPS]]
    page = (
        _environment()
        .get_template("report.html")
        .render(
            name=os.path.basename(first.folder),
            overview=overview,
            manifest=first.manifest,
            style=Markup((_HERE / "report.css").read_text(encoding="utf-8")),
            script=Markup((_HERE / "report.js").read_text(encoding="utf-8")),
            num_samples=[f"{split.name} {split.num_samples:,}" for split in overview.splits],
            split_names=[shortened(split.name, 30) for split in overview.splits],
            num_listed=len(listed),
            num_empty=sum(not any(counts) for counts in overview.classes.values()),
            num_with_pictures=len(gallery),
            rows=list(_rows(first.manifest, listed, gallery)),
            normalize=normalize_lines(overview.levels),
            cards=dict(_cards(splits, repeated)),
            max_groups=_MAX_GROUPS,
            max_of_group=_MAX_OF_GROUP,
            refused=refused,
            max_refused=MAX_REFUSED,
            reasons=Counter(reason for _, reason, *_ in refused).most_common(20),
            source_given=source_given,
            changes=list(_changes(first.manifest.provenance)),
            provenance=list(flattened(first.manifest.provenance)),
            max_facts=_MAX_FACTS,
        )
    )
    return page.encode(), overview


def normalize_lines(levels: Levels | None) -> str:
    """Returns two lines of Python, to paste into a script, for a `Normalize` with this mean and std; "" for None."""
    if levels is None:
        return ""
    mean, std = (", ".join(f"{n:.4f}" for n in numbers) for numbers in (levels.mean, levels.std))
    comma = "," if len(levels.mean) == 1 else ""
    return f"from shardio.augment import Normalize\nNormalize(mean=({mean}{comma}), std=({std}{comma}))"


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
    )
    environment.globals |= {"number": _number, "percent": lambda share: f"{_number(100 * share)}%"}
    environment.filters |= {
        "bytes": bytes_text,
        "commas": "{:,}".format,
        "counted": counted,
        "foreign": _foreign,
        "policy_hash": _policy_hash,
        "shortened": shortened,
    }
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    return environment


def _foreign(text: str, most: int = 120) -> Markup:
    """Returns untrusted text as HTML that isolates its writing direction. Shortens it to about `most` characters."""
    return Markup("<bdi>{}</bdi>").format(shortened(text, most))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"


def _policy_hash(text: str) -> str:
    """Returns the hash of a style or a script in the notation of a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _listed(classes: LabelCounts) -> LabelCounts:
    """Returns the classes that the page lists: all, or, of more than 20,000, those with the fewest and most samples."""
    if len(classes) <= _MAX_ROWS:
        return classes
    ordered = sorted(classes, key=lambda label: sum(classes[label]))
    half = _MAX_ROWS // 2
    return {label: classes[label] for label in sorted([*ordered[:half], *ordered[-half:]])}


def _rows(manifest: Manifest, listed: LabelCounts, gallery: Mapping[int, Sequence[Thumbnail]]) -> Iterator[list[Any]]:
    """Yields [label, name, display name, counts by split, [[index, key, picture], ...]] for each class."""
    for label, counts in listed.items():
        names = [
            shortened(some[label], 80) if 0 <= label < len(some) else ""
            for some in (manifest.classes, manifest.class_names)
        ]
        shown = [[index, shortened(key, 100), url] for index, key, url in gallery.get(label, ())]
        # JavaScript has no integers beyond 2**53.
        shown_label = label if abs(label) < 1 << 53 else "" if label == NO_LABEL else str(label)
        yield [shown_label, *names, counts, shown]


def _cards(
    splits: Mapping[str, ShardSet], repeated: Iterable[RepeatedSample]
) -> Iterator[tuple[RepeatedSample, dict[str, str]]]:
    """Yields each repeated sample with its class name, key and thumbnail."""
    wanted = sorted(set(repeated))
    for name, shards in splits.items():
        if not (some := [sample for sample in wanted if sample.split == name]):
            continue
        indices = np.array([sample.index for sample in some])
        pictures = read_pictures(shards, indices)
        for sample, key, picture in zip(some, keys_of(shards, indices), pictures, strict=True):
            class_name = class_text(sample.label, shards.class_names)
            yield sample, {"class_name": class_name, "key": key, "picture": thumbnail(picture)}


def _changes(provenance: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of the operations that made the set from other sets, oldest first."""
    earlier = provenance.get("earlier")
    for step in [*(earlier if isinstance(earlier, list) else []), provenance.get("change")]:
        if isinstance(step, dict):
            yield str(step.get("operation"))
