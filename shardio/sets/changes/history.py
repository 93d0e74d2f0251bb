"""The provenance of a set that was made from others: the operation with its arguments, and what came before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardio.format.manifest import Manifest
from shardio.version import __version__

# Of a set that is changed every day, a manifest need not tell more.
_MOST_EARLIER = 1000


def describe_change(operation: str, arguments: Mapping[str, Any], parents: Sequence[Manifest]) -> dict[str, Any]:
    """Returns the provenance of the new set: facts alone, no paths, so that equal changes have equal provenances."""
    earlier: list[Any] = []
    for parent in parents:
        told = parent.provenance.get("earlier")
        own = parent.provenance.get("change")
        before = list(told) if isinstance(told, list) else []
        if isinstance(own, dict):
            before.append({**own, "made": parent.digest})
        earlier += [one for one in before if one not in earlier]
    conversions: list[Any] = []
    for parent in parents:
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
    """Returns what is told of the conversions that made the pixels of the set."""
    provenance = manifest.provenance
    if isinstance(provenance.get("conversion"), dict):
        return [{name: provenance[name] for name in ("conversion", "libraries") if name in provenance}]
    told = provenance.get("conversions")
    if not isinstance(told, list):
        return []
    return [one for one in told if isinstance(one, dict) and isinstance(one.get("conversion"), dict)]
