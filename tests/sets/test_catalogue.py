"""`shardio list` shows every set below the roots, in whatever state, and nothing else."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command import assert_one_clear_error, run_forked, shardio
from disks import failing
from hooks import call_before
from servers import ObjectStore

from shardio.cache.folder import Cache
from shardio.cache.stage import stage
from shardio.format.manifest_file import load_manifest
from shardio.sets.catalogue import CatalogueEntry, list_sets
from shardio.sets.new_folder import folder_of
from shardio.sets.publish import publish
from shardio.sets.remote import RemoteStorage
from shardio.system.files import _machine


@pytest.fixture
def root(make_set: Callable[..., Path], tmp_path: Path) -> Path:
    """One set of every state, and folders that are none."""
    root = tmp_path / "root"
    root.mkdir()
    out = make_set(25)
    publish(out, root / "sound")
    for name in ("damaged", "lacking"):
        shutil.copytree(out, root / name)
    data = (root / "damaged" / "manifest.json").read_text()
    (root / "damaged" / "manifest.json").write_text(data.replace('"num_samples": 25', '"num_samples": 26'))
    (root / "lacking" / "train-00000.npy").unlink()
    (root / "converting" / ".convert").mkdir(parents=True)
    (root / "none").mkdir()
    (root / "file").write_text("no folder")
    shutil.copytree(out, root / ".sound.0123abcd-0123456789abcdef.tmp.d")
    (root / "linked").symlink_to(out)
    return root


def test_every_set_below_a_root_is_listed_with_its_state(root: Path) -> None:
    (listing,) = list_sets([str(root)])
    assert (listing.root, listing.problem) == (str(root), "")
    assert [(entry.name, entry.state) for entry in listing.sets] == [
        ("converting", "unfinished"),
        ("damaged", "damaged"),
        ("lacking", "damaged"),
        ("linked", "published"),
        ("sound", "published"),
    ]
    manifest = load_manifest(root / "sound")
    assert listing.sets[-1] == CatalogueEntry(
        "sound",
        str(root / "sound"),
        "published",
        digest=manifest.digest,
        sample_shape=(6, 5, 3),
        num_samples={"train": 25},
        nbytes=manifest.nbytes,
    )
    damaged, lacking = (entry for entry in listing.sets if entry.state == "damaged")
    assert "num_samples: expected 25, as many as in the shards, found 26" in damaged.reason
    assert (damaged.digest, damaged.num_samples) == ("", {})
    assert f"{root}/lacking/train-00000.npy: expected a file of the shard set, found nothing" in lacking.reason
    assert (lacking.digest, lacking.num_samples) == (manifest.digest, {"train": 25})


def test_a_set_that_may_not_be_read_is_listed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.sets.storage.load_manifest", failing(errno.EACCES))
    (listing,) = list_sets([str(root)])
    assert {entry.state for entry in listing.sets} == {"unreadable"}
    assert "Permission denied" in listing.sets[0].reason


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        ("train-00002.npy", lambda path: os.truncate(path, path.stat().st_size - 1)),
        ("train-index.npy", lambda path: os.truncate(path, path.stat().st_size + 1)),
        ("train-00002.npy", lambda path: path.symlink_to(path.rename(path.parent.parent / "elsewhere"))),
    ],
    ids=["cut", "grown", "link"],
)
def test_a_set_whose_files_are_not_as_they_were_is_damaged(
    file: str, harm: Callable[[Path], object], make_set: Callable[..., Path], tmp_path: Path
) -> None:
    path = make_set(25) / file
    harm(path)
    (listing,) = list_sets([str(tmp_path)])
    (entry,) = listing.sets
    assert entry.state == "damaged"
    assert entry.reason.startswith(f"{path}: expected ")
    facts = json.loads(shardio("info", path.parent, "--json").stdout)
    assert (facts["state"], facts["reason"]) == ("damaged", entry.reason)


def test_the_sets_of_an_object_store_are_listed(root: Path, store: ObjectStore) -> None:
    store.put_set(root / "sound", "listed/one")
    store.put_set(root / "damaged", "listed/two")
    store.put("sets/listed/none/file", b"x")
    store.put("sets/listed/file", b"x")
    (listing,) = list_sets(["s3://sets/listed"])
    assert [(entry.name, entry.state) for entry in listing.sets] == [("one", "published"), ("two", "damaged")]
    assert listing.sets[0].path == "s3://sets/listed/one"
    assert listing.sets[0].digest == load_manifest(root / "sound").digest
    store.put_set(root / "sound", "listed/later")
    store.put("sets/listed/later/train-00001.npy", b"cut")
    store.put_set(root / "lacking", "listed/lacking")
    (listing,) = list_sets(["s3://sets/listed"])
    assert [entry.name for entry in listing.sets] == ["lacking", "later", "one", "two"]
    lacking, cut = listing.sets[:2]
    assert (lacking.state, cut.state) == ("damaged", "damaged")
    assert lacking.reason.startswith("s3://sets/listed/lacking/train-00000.npy: expected a file of the shard set")
    assert cut.reason.startswith("s3://sets/listed/later/train-00001.npy: expected 4")
    (listing,) = list_sets(["s3://sets/nothing"])
    assert (listing.sets, "s3://sets/nothing" in listing.problem) == ((), True)


def test_what_publishers_left_is_listed_with_its_size_and_stays(make_set: Callable[..., Path], tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for name in ("dead", "alive"):
        lock = root / f".{name}.{_machine()}-0123456789abcdef.tmp"
        lock.touch()
        folder_of(lock).mkdir()
        (folder_of(lock) / "train-00000.npy").write_bytes(b"x" * 5000)
    before = sorted(root.rglob("*"))
    with lock.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (listing,) = list_sets([str(root)])
        result = shardio("list", root)
    assert [(left.nbytes, left.abandoned) for left in listing.left_overs] == [(5000, False), (5000, True)]
    assert sorted(root.rglob("*")) == before
    _, alive, dead = result.stdout.splitlines()
    assert alive == f"left over: {root}/{folder_of(lock).name}: 5 kB; a publisher may be writing it"
    assert dead.endswith(": 5 kB; the next `shardio publish` there tries to remove it")
    facts = json.loads(shardio("list", root, "--json").stdout)
    assert len(facts["roots"][0]["left_overs"]) == 2


def test_a_root_that_may_only_be_read_is_listed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(path: str | Path, flags: int, *_: int, **__: int) -> None:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        if str(path).endswith(".tmp"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (root / ".sound.0123abcd-0123456789abcdef.tmp").touch()
    call_before(monkeypatch, os, "open", read_only)
    (listing,) = list_sets([str(root)])
    assert (len(listing.sets), listing.problem) == (5, "")
    assert [left.abandoned for left in listing.left_overs] == [False]


# --- the commands ----------------------------------------------------------------------------------------------------


def test_list_prints_a_table(root: Path, tmp_path: Path) -> None:
    digest = load_manifest(root / "sound").digest
    env = {name: value for name, value in os.environ.items() if name != "SHARDIO_CACHE"}
    result = run_forked("shardio", "list", cwd=root, env=env)
    assert (result.returncode, result.stderr) == (0, "")
    header, *rows = result.stdout.splitlines()
    assert header.split() == ["name", "samples", "shape", "size", "digest", "state"]
    assert rows[0].split() == ["converting", "unfinished"]
    nbytes = f"{load_manifest(root / 'sound').nbytes / 1000:.3g}"
    texts = ["sound", "train 25", "6 x 5 x 3", f"{nbytes} kB", digest[:12], "published"]
    assert re.split("  +", rows[4]) == texts
    assert rows[4].index("published") == rows[0].index("unfinished") == header.index("state")
    assert rows[5].startswith(f"damaged: {root}/damaged/manifest.json: ")

    cached = ("list", root, "--cache", tmp_path / "cache")
    assert shardio(*cached).stdout.splitlines()[5].endswith("published   no")
    stage(root / "sound", tmp_path / "cache")
    with Cache(tmp_path / "cache").lease(digest) as lease:
        result = run_forked("shardio", "list", cwd=root, env={**env, "SHARDIO_CACHE": str(tmp_path / "cache")})
        assert result.stdout.splitlines()[5].endswith("published   yes, in use by 1")
        lines = [line for line in result.stdout.splitlines() if "in use by 1" in line]
        assert [line.split()[0] for line in lines] == ["lacking", "linked", "sound"]
        assert all(line.endswith(f", copied from {root / 'sound'}") for line in lines[:2])
    (lease.path / "manifest.json").unlink()
    assert shardio(*cached).stdout.splitlines()[5].endswith("published   unfinished")
    facts = json.loads(shardio(*cached, "--json").stdout)
    (listing,) = facts["roots"]
    assert [entry["cached"] and entry["cached"]["complete"] for entry in listing["sets"]] == [
        *(None, None, False, False, False),
    ]
    assert listing["sets"][4]["digest"] == digest
    (tmp_path / "cache" / "shardio-cache.txt").unlink()
    assert_one_clear_error(shardio(*cached), 1, "expected a cache made by")


def test_roots_that_cannot_be_read_are_told_and_hide_no_other(root: Path, tmp_path: Path) -> None:
    unreadable = [str(tmp_path / "missing"), str(root / "file"), "nonsense://x"]
    result = shardio("list", root, *unreadable)
    assert result.returncode == 1
    header, *rows = result.stdout.splitlines()
    assert header.endswith("root")
    assert sum(row.endswith(str(root)) for row in rows) == 5
    for line, place in zip(result.stderr.splitlines(), unreadable, strict=True):
        assert line.startswith(f"shardio: error: {place}: ")
    assert shardio("list", tmp_path / "missing").stdout == ""
    (tmp_path / "none").mkdir()
    assert shardio("list", tmp_path / "none").stdout == f"{tmp_path / 'none'}: no set\n"


def test_info_tells_of_a_set_that_a_url_names(root: Path, store: ObjectStore) -> None:
    store.put_set(root / "sound", "told")
    result = shardio("info", "s3://sets/told", "--json")
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert (facts["path"], facts["digest"]) == ("s3://sets/told", load_manifest(root / "sound").digest)
    assert_one_clear_error(shardio("info", "s3://sets/missing"), 1, "s3://sets/missing/manifest.json: not found")


def test_publish_sums_up_what_it_did(root: Path, tmp_path: Path, make_set: Callable[..., Path]) -> None:
    out, digest = make_set(25), load_manifest(root / "sound").digest
    result = run_forked("shardio", "publish", out, root / "copied", umask=0o022)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("copied 5 files, ")
    assert f"digest {digest[:16]}\n  published as {root / 'copied'}\n" in result.stdout
    assert_one_clear_error(shardio("publish", out, root / "copied"), 1, "expected nothing there, found something")
    assert_one_clear_error(shardio("publish", out, tmp_path), 1, str(tmp_path / "NAME"), "add a name")
    result = run_forked("shardio", "publish", out, root / "private", "--move", umask=0o077)
    assert result.stdout.startswith("moved 5 files, ")
    assert f"only its owner can read it, because of the umask: `chmod -R a+rX {root / 'private'}`" in result.stdout
    facts = json.loads(shardio("publish", root / "private", root / "again", "--json").stdout)
    assert (facts["digest"], facts["renamed"], facts["num_files"]) == (digest, False, 5)


def test_a_set_in_a_store_that_may_be_read_and_not_be_listed_is_told(
    root: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_set(root / "sound", "unlisted")
    storage = RemoteStorage("s3://sets/unlisted")
    monkeypatch.setattr(storage, "_list", failing(errno.EACCES))
    assert storage.find_fault(storage.load_manifest()) == ""
