"""Places of sets: paths, and URLs, whose credentials are shown nowhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shardio import open_shards
from shardio.conversion.repair import repair
from shardio.errors import ConvertError, SetNotFoundError
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
