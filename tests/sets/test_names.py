"""Places of sets: paths, and URLs, whose credentials are shown nowhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardio import open_shards
from shardio.cache.folder import Cache
from shardio.cache.stage import stage
from shardio.changes.change import change
from shardio.conversion.convert import convert
from shardio.conversion.estimate import estimate
from shardio.conversion.repair import repair
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.errors import CacheError, ConvertError, SetNotFoundError, SourceError
from shardio.sets.catalogue import list_sets
from shardio.sets.names import is_url, join_place, without_credentials, without_credentials_in
from shardio.sets.publish import publish
from shardio.sets.storage import open_storage
from shardio.sets.verify import verify


@pytest.mark.parametrize(
    ("url", "shown", "child"),
    [
        ("s3://b/k", "s3://b/k", "s3://b/k/m"),
        ("s3://b/k/", "s3://b/k/", "s3://b/k/m"),
        ("https://u:p@h:1/x?a=b#c", "https://h:1/x", "https://u:p@h:1/x/m?a=b"),
        ("https://token@h/x/", "https://h/x/", "https://token@h/x/m"),
        ("ftp://u:p@h/x", "ftp://h/x", "ftp://u:p@h/x/m"),
        ("abfs://container@account/x", "abfs://container@account/x", "abfs://container@account/x/m"),
    ],
)
def test_credentials_are_kept_where_they_are_needed_and_shown_nowhere(url: str, shown: str, child: str) -> None:
    assert without_credentials(url) == shown
    assert join_place(url, "m") == child
    assert without_credentials_in(f"403, url='{url}' (no)") == f"403, url='{shown}' (no)"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://u:se/cret@h:1/x?a=b", "https://h:1/x"),
        ("s3://u:se/cret@h/x", "s3://h/x"),
        ("s3://u:se@cret@h/x", "s3://h/x"),
        ("https://tok/en@h/x#c", "https://h/x"),
        # The beginning of the host is not clear.
        ("https://u:se?cret@h/x", "https://..."),
        ("ftp://u:se#cret@h/x?a", "ftp://..."),
        ("https://u:se/c?ret@h/x", "https://..."),
        ("https://u:secret@h/x?mail=a@secret", "https://..."),
        ("https://to?ken@h/x", "https://..."),
        # These are no passwords, but queries or parts of names.
        ("https://h/x?mail=a@secret", "https://h/x"),
        ("s3://b/k@v2?a=secret", "s3://b/k@v2"),
        ("abfs://container@account/x?a=b@secret", "abfs://container@account/x"),
    ],
)
def test_a_password_is_not_shown_whatever_it_holds(url: str, shown: str) -> None:
    assert without_credentials(url) == shown


def test_a_windows_path_or_a_name_with_a_colon_is_no_url() -> None:
    assert not any(map(is_url, ("a:b", "/a://b", "c:/x", "://x", "")))
    assert all(map(is_url, ("s3://b", "git+ssh://x")))


def test_a_url_is_no_folder() -> None:
    with pytest.raises(SetNotFoundError, match=r"s3://bucket/set: expected a folder, found a URL: .*`shardio stage`"):
        open_shards("s3://bucket/set?secret")


@pytest.mark.parametrize("place", ["~/sets/out", "file://{}/sets/out"])
def test_a_set_is_found_under_home_and_at_a_file_url(
    place: str, make_set: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "sets").mkdir()
    made = make_set(10).rename(tmp_path / "sets" / "out")
    (tmp_path / "sets" / "new" / ".convert").mkdir(parents=True)
    place = place.format(tmp_path)
    assert str(open_shards(place).path) == open_storage(place).name == verify(place).path == str(made)
    assert [(one.name, one.state) for one in list_sets([place[:-4]])[0].sets] == [
        ("new", "unfinished"),
        ("out", "published"),
    ]
    assert publish(place, tmp_path / "copy").num_files
    with pytest.raises(ConvertError, match="`convert` has not made"):
        repair(place, tmp_path)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("out/train", r"out is a set: did you mean this folder, and its split 'train'\?"),
        ("out/manifest.json", r"out is a set: did you mean this folder\?"),
        (".", r"found other/, out/ here: did you mean other, out\?"),
    ],
)
def test_a_path_next_to_a_set_names_the_set(
    place: str, message: str, make_set: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_set(10).rename(tmp_path / "out")
    for name in ("other", ".hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SetNotFoundError, match=message):
        open_shards(place)


# --- folders where others are expected -------------------------------------------------------------------------------

ELSEWHERE = [
    ("s3://user:secret@bucket/images", r"s3://\.\.\.: expected a path .*, found a URL: "),
    ("https://host/images", r"https://\.\.\.: expected a path .*, found a URL: "),
    (Path("gs://bucket/images"), r"gs://\.\.\.: expected a path .*, found a URL: "),
    ("file:///images", r"file://\.\.\.: expected a path .*, found a URL: "),
    ("~/images", r"~/images: expected a path without ~: use os.path.expanduser\(\)"),
]


@pytest.fixture
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
        (ConvertError, lambda: change(out, url, classes="used")),
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
    with pytest.raises(ConvertError, match="found 'file'"):
        convert(image_tree, tmp_path / "taken")
