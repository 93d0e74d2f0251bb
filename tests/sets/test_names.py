"""Places of sets: paths, and URLs, whose credentials are shown nowhere."""

from __future__ import annotations

import pytest

from shardio import open_shards
from shardio.errors import SetNotFoundError
from shardio.sets.names import is_url, join_place, without_credentials, without_credentials_in


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
