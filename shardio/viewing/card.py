"""`shardio card`: what a data hub shows of a set: croissant.json, as MLCommons' Croissant 1.1 has it, and README.md.

Names of classes and the provenance are not trusted: in README.md they cannot become Markdown, HTML or YAML.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from shardio.errors import bytes_text, counted, printable, shortened
from shardio.format.layout import MANIFEST_NAME
from shardio.format.manifest import Manifest
from shardio.reading.shardset import ShardSet
from shardio.sets.history import describe_making, flattened
from shardio.sets.levels import LEVELS, Levels, stored_levels
from shardio.viewing.overview import LabelCounts, count_labels
from shardio.viewing.pictures import labels_for_page
from shardio.viewing.report import normalize_lines

CROISSANT_NAME = "croissant.json"
README_NAME = "README.md"

# README.md shows the start of longer lists. croissant.json has all classes.
_MAX_CLASSES = 100
_MAX_FACTS = 100
_CROISSANT = "http://mlcommons.org/croissant/"
# NPY has no media type. Croissant then asks for the address of what describes the format.
_NPY = "https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html"
_TYPES = {".npy": _NPY, ".json": "application/json", ".jsonl": "application/jsonlines"}
_MARKUP = re.compile(r"([\\`*_{}\[\]<>|~&$#!])")


@dataclass(frozen=True)
class Publication:
    """What the publisher of a set says about it. `license` and `source_url` are "" if unknown.

    name: the name of the set, for people.
    license: an identifier, such as cc-by-4.0, or a URL.
    source_url: the page of the images from which the set was made.
    """

    name: str
    license: str = ""
    source_url: str = ""


@dataclass(frozen=True)
class _Facts:
    """A set, and what was computed of it for both files."""

    publication: Publication
    manifest: Manifest
    labelled: Sequence[str]
    """The splits that have class numbers."""
    classes: Sequence[LabelCounts]
    """The number of samples of each class in each of these splits."""
    levels: Levels | None
    refused: str


def make_card(
    splits: Mapping[str, ShardSet], manifest_file: bytes, publication: Publication, reasons: Mapping[str, int]
) -> dict[str, bytes]:
    """Returns the bytes of croissant.json and README.md, by file name. The same set has the same bytes.

    `splits` comes from `open_splits`, `manifest_file` is the content of the set's manifest.json, and `reasons` are the
    numbers of refused images by reason.
    """
    manifest = next(iter(splits.values())).manifest
    labelled = {name: shards for name, shards in splits.items() if shards.content.index.has_label}
    counts = count_labels([labels_for_page(shards) for shards in labelled.values()], len(manifest.classes))
    shape = manifest.sample_shape
    told = ", ".join(f"{reason} {count:,}" for reason, count in reasons.items())
    facts = _Facts(
        publication,
        manifest,
        list(labelled),
        counts if manifest.classes else (),
        stored_levels(manifest.provenance, shape[2]) if shape else None,
        f"{counted(manifest.rejects.num_rejects, 'image' if shape else 'sample')} refused"
        + (f" ({told})" if told else ""),
    )
    croissant = _croissant(facts, list(splits), hashlib.sha256(manifest_file).hexdigest(), len(manifest_file))
    return {
        CROISSANT_NAME: (json.dumps(croissant, indent=1) + "\n").encode("ascii"),
        README_NAME: _readme(facts, list(splits)).encode(),
    }


def _describe(facts: _Facts) -> str:
    manifest, shape = facts.manifest, facts.manifest.sample_shape
    what = f"{' x '.join(map(str, shape))} uint8 pixels" if shape else "arrays"
    classes = f" in {counted(len(manifest.classes), 'class')}" if manifest.classes else ""
    num_samples = sum(split.num_samples for split in manifest.splits.values())
    return f"{counted(num_samples, 'sample')} of {what}{classes}, stored as NPY shards of shardio. {facts.refused}."


# --- croissant.json --------------------------------------------------------------------------------------------------


def _context() -> dict[str, Any]:
    """Returns the JSON-LD context that Croissant 1.1 recommends, and the prefix of PROV."""
    terms = "arrayShape citeAs column containedIn equivalentProperty extract field fileProperty fileObject fileSet "
    terms += "format includes isArray isLiveDataset jsonPath key md5 parentField path recordSet references regex "
    terms += "repeated replace samplingRate separator source subField transform"
    return {
        "@language": "en",
        "@vocab": "https://schema.org/",
        "sc": "https://schema.org/",
        "cr": _CROISSANT,
        "rai": f"{_CROISSANT}RAI/",
        "dct": "http://purl.org/dc/terms/",
        "prov": "http://www.w3.org/ns/prov#",
        "conformsTo": "dct:conformsTo",
        "data": {"@id": "cr:data", "@type": "@json"},
        "examples": {"@id": "cr:examples", "@type": "@json"},
        "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
        "name": {"@container": "@language"},
        "description": {"@container": "@language"},
        **{term: f"cr:{term}" for term in terms.split()},
    }


def _croissant(facts: _Facts, splits: Sequence[str], manifest_sha256: str, manifest_nbytes: int) -> dict[str, Any]:
    publication, manifest = facts.publication, facts.manifest
    document: dict[str, Any] = {
        "@context": _context(),
        "@type": "sc:Dataset",
        "conformsTo": f"{_CROISSANT}1.1",
        "name": publication.name,
        "description": _describe(facts),
    }
    if publication.license:
        document["license"] = publication.license
    if publication.source_url:
        document["prov:wasDerivedFrom"] = {"@id": publication.source_url}
    if made := describe_making(manifest):
        document["prov:wasGeneratedBy"] = {"@type": "prov:Activity", "prov:label": made}
    document["distribution"] = [
        _file_object(MANIFEST_NAME, manifest_nbytes, manifest_sha256),
        *(_file_object(entry.file, entry.nbytes, entry.sha256) for entry in manifest.files),
    ]
    document["recordSet"] = list(_record_sets(facts, splits))
    return document


def _file_object(file: str, nbytes: int, sha256: str) -> dict[str, Any]:
    return {
        "@type": "cr:FileObject",
        "@id": file,
        "name": file,
        "contentUrl": file,
        "contentSize": f"{nbytes} B",
        "encodingFormat": _TYPES.get(Path(file).suffix, "application/octet-stream"),
        "sha256": sha256,
    }


def _record_sets(facts: _Facts, splits: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields tables of the splits, the classes and the levels of the pixels. No reader of Croissant reads NPY."""
    manifest, levels = facts.manifest, facts.levels
    rows = [[name, manifest.splits[name].num_samples] for name in splits]
    yield _table("splits", "cr:Split", {"name": "sc:Text", "num_samples": "sc:Integer"}, rows)
    if facts.classes:
        fields = {"label": "sc:Integer", "name": "sc:Text", "display_name": "sc:Text"}
        fields |= {f"num_samples_{name}": "sc:Integer" for name in facts.labelled}
        shown = manifest.class_names or manifest.classes
        rows = [[one.label, manifest.classes[one.label], shown[one.label], *one.counts] for one in facts.classes]
        yield _table("classes", "sc:Enumeration", fields, rows)
    if levels is not None:
        rows = [list(row) for row in zip(range(len(levels.mean)), levels.mean, levels.std, strict=True)]
        fields = {"channel": "sc:Integer", "mean": "sc:Float", "std": "sc:Float"}
        yield _table("pixels", "", fields, rows) | {
            "description": f"Mean and standard deviation, black 0 and white 1, of {levels.num_samples} samples "
            f"of {levels.split}."
        }


def _table(name: str, kind: str, fields: Mapping[str, str], rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Returns a record set with its records. The first field is the key."""
    names = [f"{name}/{field}" for field in fields]
    return {
        "@type": "cr:RecordSet",
        "@id": name,
        "name": name,
        **({"dataType": kind} if kind else {}),
        "key": {"@id": names[0]},
        "field": [
            {"@type": "cr:Field", "@id": f"{name}/{field}", "name": field, "dataType": data_type}
            for field, data_type in fields.items()
        ],
        "data": [dict(zip(names, row, strict=True)) for row in rows],
    }


# --- README.md -------------------------------------------------------------------------------------------------------


def _readme(facts: _Facts, splits: Sequence[str]) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"bytes": bytes_text, "commas": "{:,}".format, "plain": _plain, "yaml": _yaml}
    manifest = facts.manifest
    return environment.get_template("card.md").render(
        facts=facts,
        manifest=manifest,
        description=_describe(facts),
        size_category=_size_category(sum(split.num_samples for split in manifest.splits.values())),
        license_is_url="://" in facts.publication.license,
        splits=splits,
        max_classes=_MAX_CLASSES,
        normalize=normalize_lines(facts.levels),
        making=describe_making(manifest),
        provenance=[fact for fact in flattened(manifest.provenance) if not fact[0].startswith(LEVELS)][:_MAX_FACTS],
        croissant_name=CROISSANT_NAME,
    )


def _plain(text: str, most: int = 120) -> str:
    """Returns untrusted text as Markdown that shows it as it is. Shortens it to about `most` characters."""
    return _MARKUP.sub(r"\\\1", shortened(text, most))


def _yaml(text: str) -> str:
    """Returns text as a YAML string. Printable characters in JSON's quotes mean the same in YAML."""
    return json.dumps(printable(text), ensure_ascii=False)


def _size_category(num_samples: int) -> str:
    """Returns the size category of Hugging Face's hub."""
    bounds = ["1K", "10K", "100K", "1M", "10M", "100M", "1B"]
    place = max(0, len(str(num_samples)) - 3)
    return "n<1K" if not place else f"{bounds[place - 1]}<n<{bounds[place]}" if place < len(bounds) else "n>1B"
