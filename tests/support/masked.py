"""The options of a conversion with masks."""

from __future__ import annotations

from typing import Any

SIZE = 16
OPTIONS: dict[str, Any] = {"size": SIZE, "shard_size": 4096 + 3 * SIZE * SIZE * 3, "workers": 1}
"""Of `with_masks`: eleven samples in train and four in val, three to a shard at most."""
