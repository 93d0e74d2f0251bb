"""Writes and reads the provenance of a set made from other sets, its parents.

It records the operation, its arguments, and the provenance of the parents.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardio.errors import counted, shortened
from shardio.format.manifest import Manifest
from shardio.version import __version__

# Of a set that is changed every day, a manifest need not tell more.
_MOST_EARLIER = 1000
_LONGEST_VALUE = 40


def describe_change(operation: str, arguments: Mapping[str, Any], parents: Sequence[Manifest]) -> dict[str, Any]:
    """Returns the provenance of a set that the command `operation` makes from the sets `parents`. `arguments` maps the
    names of options to their values. It has no paths, so equal changes give equal provenances."""
    earlier: list[Any] = []
    conversions: list[Any] = []
    for parent in parents:
        told = parent.provenance.get("earlier")
        own = parent.provenance.get("change")
        before = list(told) if isinstance(told, list) else []
        if isinstance(own, dict):
            before.append({**own, "made": parent.digest})
        earlier += [one for one in before if one not in earlier]
        conversions += [one for one in conversions_of(parent) if one not in conversions]
    return {
        "shardio": __version__,
        "change": {
            "operation": operation,
            "arguments": {name: value for name, value in arguments.items() if value not in (None, (), [], {}, False)},
            "parents": [parent.digest for parent in parents],
        },
        **({"earlier": earlier[-_MOST_EARLIER:]} if earlier else {}),
        **({"conversions": conversions} if conversions else {}),
    }


def conversions_of(manifest: Manifest) -> list[dict[str, Any]]:
    """Returns the records of the conversions that made a set's pixels, from the set's provenance."""
    provenance = manifest.provenance
    if isinstance(provenance.get("conversion"), dict):
        return [{name: provenance[name] for name in ("conversion", "libraries") if name in provenance}]
    told = provenance.get("conversions")
    if not isinstance(told, list):
        return []
    return [one for one in told if isinstance(one, dict) and isinstance(one.get("conversion"), dict)]


def describe_making(manifest: Manifest) -> str:
    """Returns a short text on how the set was made; "" if its provenance does not record it."""
    parts = []
    provenance = manifest.provenance
    if isinstance(change := provenance.get("change"), dict):
        arguments, parents = change.get("arguments"), change.get("parents")
        how = _short(arguments) if isinstance(arguments, dict) else ""
        of = f"of {', '.join(str(one)[:12] for one in parents)}" if isinstance(parents, list) else ""
        parts.append(" ".join(filter(None, (f"`shardio {change.get('operation')}`", of, how))))
    for one in conversions_of(manifest)[:1]:
        conversion = one["conversion"]
        told = [_short(conversion[name]) for name in ("fit", "resample", "quality", "order") if name in conversion]
        if "seed" in conversion:
            told.append(f"seed {_short(conversion['seed'])}")
        if type(count := conversion.get("num_sources")) is int:
            told.append(counted(count, "sample" if conversion.get("size", 0) is None else "image"))
        parts.append(f"`shardio convert`: {', '.join(told)}")
        if isinstance(libraries := one.get("libraries"), dict):
            parts.append(", ".join(f"{name} {_short(value)}" for name, value in libraries.items()))
    return "; ".join(parts)


def _short(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(one)}" for name, one in value.items())
    return shortened(", ".join(map(str, value)) if isinstance(value, list) else str(value), _LONGEST_VALUE)


def flattened(values: Mapping[str, Any] | Sequence[Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields (path, text) of each value, such as ("conversion.size", "256, 256"). `prefix` begins each path."""
    for name, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        if isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(x, (dict, list)) for x in value)):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", ", ".join(map(_text, value)) if isinstance(value, list) else _text(value)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
