"""Fixtures of conversions with masks, and worker processes that start quickly."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conversions
import numpy as np
import pytest
from conversions import OPTIONS
from folders import hashes, put
from pictures import encode, random_picture
from proposals import checked

from shardio.conversion import engine
from shardio.conversion.convert import convert
from shardio.format.manifest_file import load_manifest
from shardio.sets.verify import verify


@pytest.fixture(autouse=True)
def proposals_do_what_they_say() -> Iterator[None]:
    """Runs each command that a refusal proposes, after the test: the result is what its sentence says, or a refusal."""
    with checked():
        yield


@pytest.fixture(autouse=True)
def workers_that_start_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks workers from the process that has the slow modules imported (tests/support/command.py), where spawned ones
    would import them. They do not inherit anything either. Commands and scripts spawn theirs, and so do the tests of
    storms."""
    quick = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(
        engine, "multiprocessing", SimpleNamespace(get_context=lambda name: quick, parent_process=lambda: None)
    )


@pytest.fixture
def nothing_printed(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Many decoders print warnings to stderr, also from C; a conversion of a million images must not."""
    yield
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str, Callable[[], object]], None]:
    """meanwhile(owner, name, do): the next call of this function has `do` done first, as by another process."""

    def install(owner: Any, name: str, do: Callable[[], object]) -> None:
        def after_the_other(*arguments: Any) -> Any:
            monkeypatch.setattr(owner, name, real)
            do()
            return real(*arguments)

        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, after_the_other)

    return install


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def finished(image_tree: Path, tmp_path: Path) -> dict[str, str]:
    """The hashes of the set of `image_tree` in the order of its sources that one process makes at once."""
    return conversions.undisturbed(image_tree, tmp_path / "undisturbed", **OPTIONS, order="source")


@pytest.fixture
def with_masks(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A tree with masks of which one is missing. Returns it and options for `convert`."""
    for split, count in (("train", 12), ("val", 4)):
        for i in range(count):
            height, width = 16 + 5 * i, 70 - 4 * i
            name = f"{split}/{'ab'[i % 2]}/{i}"
            for folder, data in (
                ("src", encode(random_picture(np.random.default_rng(i), height, width), "PNG")),
                ("masks", encode(np.random.default_rng(i).integers(0, 99, (height, width), np.uint8), "PNG")),
            ):
                put(tmp_path / folder, f"{name}.png", content=data)
    (tmp_path / "masks" / "train" / "a" / "4.png").unlink()
    return tmp_path / "src", {**OPTIONS, "masks": tmp_path / "masks", "max_bad": 1}


@pytest.fixture
def undisturbed(with_masks: tuple[Path, dict[str, Any]], tmp_path: Path) -> dict[str, str]:
    src, options = with_masks
    report = convert(src, tmp_path / "undisturbed", **options)
    assert report.num_samples == {"train": 11, "val": 4}
    assert verify(tmp_path / "undisturbed").ok
    assert sorted(load_manifest(tmp_path / "undisturbed").splits["val"].arrays) == ["mask"]
    return hashes(tmp_path / "undisturbed")
