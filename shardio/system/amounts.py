"""Amounts as people read them."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """Returns a number of bytes with three digits, in units of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def counted(count: int, noun: str) -> str:
    """Returns "1 shard", "2 shards", "1,000 classes"."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"
