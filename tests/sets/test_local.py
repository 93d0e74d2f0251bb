"""Folders that are given where others are expected: every call names the mistake, and writes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardio.cache.folder import Cache
from shardio.cache.stage import stage
from shardio.conversion.convert import convert
from shardio.conversion.estimate import estimate
from shardio.conversion.repair import repair
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.errors import CacheError, ConvertError, SetNotFoundError, SourceError
from shardio.sets.publish import publish

ELSEWHERE = [
    ("s3://user:secret@bucket/images", r"s3://\.\.\.: expected a path .*, found a URL: "),
    ("https://host/images", r"https://\.\.\.: expected a path .*, found a URL: "),
    (Path("gs://bucket/images"), r"gs://\.\.\.: expected a path .*, found a URL: "),
    ("file:///images", r"file://\.\.\.: expected a path .*, found a URL: "),
    ("~/images", r"~/images: expected a path without ~: use os.path.expanduser\(\)"),
]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a folder named like a URL would be made."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize(("url", "message"), ELSEWHERE, ids=str)
def test_a_url_or_a_home_where_a_path_must_be_is_told_and_no_folder_is_made(
    url: str | Path, message: str, image_tree: Path, make_set: Callable[..., Path], empty_folder: Path
) -> None:
    out = make_set(10)
    calls: list[tuple[type[Exception], Callable[[], Any]]] = [
        (SourceError, lambda: convert(url, "out")),
        (SourceError, lambda: estimate(url)),
        (SourceError, lambda: repair(out, url)),
        (ConvertError, lambda: convert(image_tree, url)),
        (ConvertError, lambda: publish(out, url)),
        (ConvertError, lambda: ShardWriter(url, (4, 4, 3))),
        (CacheError, lambda: Cache(url)),
        (CacheError, lambda: stage(out, url)),
    ]
    for error, call in calls:
        with pytest.raises(error, match=f"^{message}"):
            call()
    assert not list(empty_folder.iterdir())


def test_a_folder_that_is_named_like_a_scheme_is_a_folder(image_tree: Path, empty_folder: Path) -> None:
    (empty_folder / "s3:").mkdir()
    image_tree.rename(empty_folder / "s3:" / "images")
    assert convert("s3:/images", "out", size=16, workers=1).num_samples == {"train": 12, "val": 6}


def test_the_wrong_order_is_told(image_tree: Path, make_set: Callable[..., Path], tmp_path: Path) -> None:
    out = make_set(10)
    cache = Path(stage(out, tmp_path / "cache").path).parent
    unfinished = tmp_path / "unfinished"
    (unfinished / ".convert").mkdir(parents=True)
    new = tmp_path / "new"
    for call, error, message in (
        (lambda: convert(out, new), SourceError, "SRC is a shard set"),
        (lambda: convert(unfinished, new), SourceError, "SRC is a shard set"),
        (lambda: convert(out, image_tree), ConvertError, r"found 'train' in it.*\(SRC, the images, comes first, and"),
        (lambda: estimate(out, image_tree), ConvertError, r"found 'train' in it.*\(SRC, the images, comes first, and"),
        (lambda: estimate(image_tree, image_tree / "out"), ConvertError, "found one inside the other"),
        (lambda: convert(new, image_tree), ConvertError, r"found 'train' in it.*\(SRC, the images, comes first, and"),
        (lambda: repair(image_tree, out), SetNotFoundError, f"{out} is a set: OUT, the set, comes first, and SRC"),
        (lambda: stage(cache, out), SetNotFoundError, f"{out} is a set: SRC, the set, comes first, and CACHE"),
        (lambda: stage(new, out), SetNotFoundError, f"{out} is a set: SRC, the set, comes first, and CACHE"),
        (lambda: publish(new, out), SetNotFoundError, f"{out} is a set: OUT, the set, comes first, and ROOT/NAME"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert sorted(os.listdir(image_tree)) == ["train", "val"]
    assert not new.exists()


def test_no_order_is_suspected_where_the_other_folder_is_no_set(image_tree: Path, tmp_path: Path) -> None:
    for call in (
        lambda: repair(tmp_path / "new", image_tree),
        lambda: stage(tmp_path / "new", tmp_path / "cache"),
        lambda: publish(tmp_path / "new", tmp_path / "name"),
    ):
        with pytest.raises(SetNotFoundError) as caught:
            call()
        assert "comes first" not in str(caught.value)


def test_a_folder_that_is_taken_is_told_before_the_images_are_listed(
    image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_bytes(b"")
    monkeypatch.delattr("shardio.conversion.collect.list_source")
    with pytest.raises(
        ConvertError, match=r"expected no folder, an empty one or an unfinished conversion; found 'file'"
    ):
        convert(image_tree, tmp_path / "taken")
