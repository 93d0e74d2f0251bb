"""A conversion with an array of each kind that `convert` makes by itself: its options, and their names."""

from __future__ import annotations

from typing import Any

SIZE = 16
OPTIONS: dict[str, Any] = {"size": SIZE, "shard_size": 4096 + 3 * SIZE * SIZE * 3, "also": (8, (4, 6)), "workers": 1}
NAMES = ["image4x6", "image8", "mask"]
"""The arrays of `with_masks`; eleven samples in train and four in val, three to a shard at most."""
