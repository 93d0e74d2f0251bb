"""Names of sets: paths, URLs, and names that are looked for in the roots of SHARDIO_PATH."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from servers import ObjectStore

from shardio import ShardDataset, ShardLoader, open_shards
from shardio.errors import SetNotFoundError
from shardio.sets.index import read_indexes
from shardio.sets.names import (
    catalogue_roots,
    find_folder,
    is_url,
    join_place,
    without_credentials,
    without_credentials_in,
)
from shardio.sets.storage import FolderStorage, open_storage


@pytest.fixture
def root(make_set: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root of the catalogue, which has one set; the working folder has none."""
    root = tmp_path / "root"
    root.mkdir()
    make_set(25).rename(root / "small")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("SHARDIO_PATH", f"/nowhere:{root}")
    return root


@pytest.mark.parametrize(
    ("value", "roots"),
    [
        ("", []),
        (":", []),
        ("/a:/b", ["/a", "/b"]),
        ("a:b:", ["a", "b"]),
        ("s3://b/x:/data", ["s3://b/x", "/data"]),
        ("/data:s3://b:gs://c", ["/data", "s3://b", "gs://c"]),
        ("s3://b:/data", ["s3://b", "/data"]),
        ("https://host:8080/x:s3://b", ["https://host:8080/x", "s3://b"]),
        ("https://host:8080:/x", ["https://host:8080", "/x"]),
        ("http://[::1]:90/a:/c", ["http://[::1]:90/a", "/c"]),
        ("https://u:p@host:9/a:/b::/c", ["https://u:p@host:9/a", "/b", "/c"]),
        ("file:///a:memory://b/c", ["/a", "memory://b/c"]),
    ],
)
def test_roots_stand_between_colons_that_belong_to_no_url(
    value: str, roots: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDIO_PATH", value)
    assert catalogue_roots() == roots


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


def test_a_name_is_found_in_the_roots(root: Path) -> None:
    assert find_folder("small") == str(root / "small")
    assert len(open_shards("small")) == 25
    assert open_shards(Path("small")).path == root / "small"
    assert len(ShardDataset("small")) == 25
    with ShardLoader("small", 5, device="cpu") as loader:
        assert loader.shards.path == root / "small"
    place = open_storage("small")
    assert (type(place), place.name) == (FolderStorage, str(root / "small"))


def test_what_exists_as_a_path_is_that_path(root: Path) -> None:
    Path("small").mkdir()
    assert find_folder("small") == "small"
    with pytest.raises(SetNotFoundError, match="holds no shard set"):
        open_shards("small")
    Path("small").rmdir()
    Path("small").symlink_to("nowhere")
    assert find_folder("small") == "small"
    for place in ("./small", "../root/small", "", ".", ".."):
        assert find_folder(place) == place


@pytest.mark.parametrize("path", ["./small", "small/", "../here/small"])
def test_a_path_is_never_looked_for_in_the_roots(root: Path, path: str) -> None:
    for read in (open_shards, read_indexes):
        with pytest.raises(SetNotFoundError, match="small"):
            read(path)


def test_the_first_root_that_has_the_set_finished_counts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = root.parent / "first", root.parent / "last"
    shutil.copytree(root / "small", last / "small")
    (first / "small" / ".convert").mkdir(parents=True)
    monkeypatch.setenv("SHARDIO_PATH", f"{first}:{root}:{last}")
    assert find_folder("small") == str(root / "small")
    (root / "small" / "manifest.json").unlink()
    assert find_folder("small") == str(last / "small")
    (last / "small" / "manifest.json").unlink()
    with pytest.raises(SetNotFoundError, match="a conversion into this folder was not finished"):
        open_shards("small")


def test_a_name_that_is_nowhere_is_an_error_with_the_roots(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SetNotFoundError, match=f"large: not found: .* SHARDIO_PATH: /nowhere, {root}$"):
        open_shards("large")
    with pytest.raises(SetNotFoundError, match=f"large: not found: .* SHARDIO_PATH: /nowhere, {root}$"):
        open_storage("large")
    monkeypatch.setenv("SHARDIO_PATH", f"{root}:https://u:secret@host/sets")
    with pytest.raises(SetNotFoundError, match=r"https://host/sets \(URLs were not looked into"):
        open_shards("large")
    monkeypatch.delenv("SHARDIO_PATH")
    with pytest.raises(SetNotFoundError, match="the folder small does not exist"):
        open_shards("small")


def test_a_storage_is_looked_for_in_urls_too_and_the_first_root_counts(
    root: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_set(root / "small", "named")
    store.put_set(root / "small", "small")
    monkeypatch.setenv("SHARDIO_PATH", f"{root}:s3://sets")
    assert open_storage("small").name == str(root / "small")
    assert open_storage("named").name == "s3://sets/named"
    with pytest.raises(SetNotFoundError, match=f"large: not found: .*: {root}, s3://sets$"):
        open_storage("large")
    monkeypatch.setenv("SHARDIO_PATH", f"s3://sets:{root}")
    assert open_storage("small").name == "s3://sets/small"
    assert find_folder("small") == str(root / "small")  # a folder, which can be mapped


def test_a_url_is_no_folder(root: Path) -> None:
    with pytest.raises(SetNotFoundError, match=r"s3://bucket/set: expected a folder, found a URL: .*`shardio stage`"):
        open_shards("s3://bucket/set?secret")
