"""Loaders of one set, read in every way: by ranks, resumed, staged, from a cache, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from shardio.cli.main import cli
from shardio.loading.loader import ShardLoader

Checked = Callable[[tuple[Any, ...]], list[int]]
"""Checks the values of a batch, and returns the numbers of its samples."""


def check_every_way(out: Path, checked: Checked, io: Any, folder: Path, array: str) -> None:
    """Checks that batches of a set of whole batches of 8 are the same however they are read; and `array`, replayed."""

    def make(rank: int = 0, world_size: int = 1, batch_size: int = 8, **more: Any) -> ShardLoader:
        options: dict[str, Any] = {"device": "cpu", "seed": 3, "return_indices": True, "io": io}
        options["check"] = "sample" if io == "mmap" else "off"  # which wraps the reader
        return ShardLoader(out, batch_size, rank=rank, world_size=world_size, **options, **more)

    with make() as loader:
        batches = list(loader)
        whole = [checked(batch) for batch in batches]
    assert sorted(number for batch in whole for number in batch) == list(range(8 * len(whole)))
    with make() as loader:
        some = iter(loader)
        assert [checked(next(some)) for _ in range(2)] == whole[:2]
        state = loader.state_dict()
    ranks = []
    for rank in range(2):
        with make(rank, 2, 4) as loader:
            loader.load_state_dict(state)
            ranks.append([checked(batch) for batch in loader])
    assert [sorted(a + b) for a, b in zip(*ranks, strict=True)] == [sorted(batch) for batch in whole[2:]]
    if io == "mmap":
        for _ in range(2):  # while it is staged, and from the copy
            with make(cache=folder / "cache") as loader:
                assert [checked(batch) for batch in loader] == whole
    options = ["--batch-size=8", "--seed=3", "--step=1", f"--save={folder / 'batch.npz'}"]
    replayed = CliRunner().invoke(cli, ["replay", str(out), *options])
    assert replayed.exit_code == 0, replayed.output
    with np.load(folder / "batch.npz") as batch:
        assert batch["indices"].tolist() == whole[1]
        parts = batches[1][-1] if isinstance(batches[1][-1], dict) else {"images": batches[1][0]}
        np.testing.assert_array_equal(batch[array], parts[array].numpy())
