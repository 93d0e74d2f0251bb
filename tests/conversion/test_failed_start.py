"""A conversion that fails before its first image leaves OUT as it was, and makes no OUT."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
from command import assert_one_clear_error, run_forked
from conversions import OPTIONS, run_on
from disks import raising

from shardio.conversion.convert import convert
from shardio.conversion.options import Progress
from shardio.conversion.sources.table import Table
from shardio.errors import ConvertError, SourceError, SpaceError


def no_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 100))


def failing(name: str, error: BaseException) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(f"shardio.conversion.{name}", raising(error))


FULL = OSError(errno.ENOSPC, "No space left on device")
WAYS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], dict[str, Any], type[BaseException]]] = {
    "no room": (no_room, {}, SpaceError),
    "no room for the plan": (failing("claim.write_atomic", FULL), {}, SpaceError),
    "no room for the folder": (failing("claim.make_folder", FULL), {}, SpaceError),
    "workers unlike": (failing("engine._work", ConvertError("host has another torch")), {}, ConvertError),
    "no worker": (failing("engine.ProcessPoolExecutor.submit", BrokenProcessPool()), {"workers": 8}, ConvertError),
    "interrupted": (failing("convert.load_records", KeyboardInterrupt()), {}, KeyboardInterrupt),
    "bad option": (lambda patch: None, {"size": "x"}, ValueError),
    "no columns": (lambda patch: None, {"table": Table("nowhere.csv")}, SourceError),
}


def tree_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left_of_a_start_that_fails(
    way: str, there: bool, image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new" / "out"
    if there:
        out.mkdir(parents=True)
    before = tree_of(tmp_path)
    spoil, options, error = WAYS[way]
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        spoil(patch)
        if way == "workers unlike":
            run_on(pool, patch)
        with pytest.raises(error):
            convert(image_tree, out, **{**OPTIONS, **options})
    assert tree_of(tmp_path) == before
    assert convert(image_tree, out, **OPTIONS).digest


def test_an_error_of_the_callers_own_does_not_name_the_lock(image_tree: Path, tmp_path: Path) -> None:
    def fail(progress: Progress) -> None:
        raise BrokenPipeError(errno.EPIPE, "nobody reads")

    with pytest.raises(BrokenPipeError) as caught:
        convert(image_tree, tmp_path / "out", **OPTIONS, on_progress=fail)
    assert caught.value.filename is None


def test_an_unfinished_conversion_stays_one_when_going_on_fails(
    image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    convert(image_tree, out, **OPTIONS, part=(1, 2))
    before = tree_of(out)
    with monkeypatch.context() as patch:
        no_room(patch)
        with pytest.raises(SpaceError):
            convert(image_tree, out, **OPTIONS)
    assert tree_of(out) == before
    assert convert(image_tree, out, **OPTIONS).digest


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_plan_that_another_call_relies_on_is_not_taken_back(
    when: str, image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    mark = out / ".convert" / "run.another"

    def come(*arguments: Any) -> Any:
        if when == "before":
            mark.touch()
        raise KeyboardInterrupt

    rmdir = Path.rmdir

    def come_before(folder: Path) -> None:
        if folder.name == ".convert":
            mark.touch()
        rmdir(folder)

    with monkeypatch.context() as patch:
        patch.setattr("shardio.conversion.convert.load_records", come)
        if when == "meanwhile":
            patch.setattr(Path, "rmdir", come_before)
        with pytest.raises(KeyboardInterrupt):
            convert(image_tree, out, **OPTIONS)
    assert tree_of(out) == [".convert", ".convert/plan.json", ".convert/run.another"]
    assert convert(image_tree, out, **OPTIONS).digest
    assert not (out / ".convert").exists()


def test_a_missing_dask_is_told_before_the_images_are_listed(
    image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.delattr("shardio.conversion.collect.list_source")
    with pytest.raises(ConvertError, match=r"pip install 'shardio\[dask\]'"):
        convert(image_tree, tmp_path / "out", **OPTIONS, scheduler="tcp://127.0.0.1:8786")
    assert not (tmp_path / "out").exists()


def test_the_command_leaves_nothing_either(image_tree: Path, tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    env = {**os.environ, "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "200ms"}
    for address, code, message in (
        ("tcp://127.0.0.1:1", 1, "tcp://127.0.0.1:1: expected a Dask scheduler, found none"),
        ("nonsense://x", 2, "scheduler must be an address such as tcp://host:8786"),
    ):
        result = run_forked("shardio", "convert", image_tree, tmp_path / "out", "--scheduler", address, env=env)
        assert_one_clear_error(result, code, message)
        assert os.listdir(tmp_path) == ["images"]
