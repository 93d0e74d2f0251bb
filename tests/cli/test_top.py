"""`shardio top`: the loaders that run on this node."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import shardio.loading.status
from shardio.cli.main import cli
from shardio.loading.loader import ShardLoader


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.cli.top._SECONDS", 0.01)


def test_a_table_has_a_line_for_each_loader(make_set: Callable[..., Path]) -> None:
    path = make_set(40)
    with (
        ShardLoader(path, 4, device="cpu", rank=1, world_size=2) as first,
        ShardLoader(path, 8, device="cpu", shuffle=False) as second,
    ):
        iterators = [iter(first), iter(second)]
        for iterator in iterators:
            next(iterator)
        told = json.loads(CliRunner().invoke(cli, ["top", "--json"], catch_exceptions=False).stdout)
        mine = [one for one in told["loaders"] if one["path"] == str(path)]
        assert [(one["rank"], one["batch_size"], one["step"]) for one in mine] == [(1, 4, 1), (0, 8, 1)]
        text = CliRunner().invoke(cli, ["top"], catch_exceptions=False).stdout
        assert text.split("\n")[0].split() == ["pid", "rank", "epoch:step", "images/s", "waited", "limits", "set"]
        assert sum(line.endswith(f"{path} train") for line in text.split("\n")) == 2


def test_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardio.loading.status, "find_loaders", list)
    result = CliRunner().invoke(cli, ["top"], catch_exceptions=False)
    assert result.stdout == "no ShardLoader runs on this node in a process of yours\n"
    assert result.exit_code == 0
