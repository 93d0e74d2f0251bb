"""`publish` puts a finished set into a shared root, as a new folder that appears whole."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardio.errors import ConvertError, FormatError, SpaceError
from shardio.format.layout import MANIFEST_NAME, MARKER_NAME, is_safe_name
from shardio.format.manifest_file import commit_manifest, load_manifest
from shardio.sets.names import check_local, hinting_at_order, local_folder
from shardio.sets.new_folder import check_new, rename_new, sweep_beside, temporary_folder
from shardio.sets.storage import FileCopier, FolderStorage
from shardio.sets.verify import verify
from shardio.system.files import AtomicFile, fsync_file, fsync_folder, sweep_temporaries
from shardio.system.opening import FolderHandle, naming_owner

ReadableBy = Literal["all", "group", "owner"]


@dataclass(frozen=True)
class PublishReport:
    path: str
    digest: str
    num_files: int
    nbytes: int
    """The total size in bytes of all files except the manifest."""
    renamed: bool
    """True if the set was renamed, false if its files were copied."""
    readable_by: ReadableBy
    """The users who may read the set, by the permissions of the folder and its files. The umask may exclude some."""


def publish(
    out: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    move: bool = False,
    workers: int = 2,
    on_progress: Callable[[int, int], None] | None = None,
) -> PublishReport:
    """Copies the finished set in the folder `out` to `target`, a new folder in an existing root.

    Copies only the set's own files, and compares them with the manifest's checksums. With `move`, a set on the root's
    filesystem is renamed after `verify(quick=True)`; any other set is copied and then removed. Folder and files get the
    permissions of new files there, and the root's group if the root is setgid.

    `workers` threads copy a file each, and call `on_progress` with (bytes copied since the last call, total bytes).
    Raises ConvertError if `target` exists, FormatError if a file is damaged, SpaceError, OSError. After an error,
    nothing is at `target`, and `out` still has the set, perhaps with other permissions. A killed process leaves the
    whole set, or a temporary folder, which the next publisher into the root removes.
    """
    check_local(target, ConvertError, "publish into a folder, or copy the set there (docs/cluster.md)")
    source, target = Path(os.path.realpath(local_folder(out))), Path(target)
    sweep_beside(target)  # also if a killed call has moved the set already
    with hinting_at_order(target, "OUT, the set, comes first, and ROOT/NAME, where it shall go, second"):
        manifest = load_manifest(source)
    names = [MANIFEST_NAME, *(entry.file for entry in manifest.files)]
    if move and (source.parent / MARKER_NAME).exists():
        raise ConvertError(f"{source}: is a copy in a cache, which jobs may use: publish a copy (without --move)")
    if not is_safe_name(target.name):
        raise ConvertError(
            f"{target}: expected ROOT/NAME, where NAME has letters, digits, '.', '_' and '-', and begins with a "
            f"letter or digit; found the NAME {target.name!r}"
        )
    check_new(target, [source])
    way_out = "ask the owner for permission to write, or use another ROOT"
    with naming_owner(target.with_name(f".{target.name}."), way_out), temporary_folder(target) as (folder, lock):
        renamed = move and _can_be_renamed(source, target.parent) and _make_movable(source, names, folder, lock)
        if renamed:
            try:
                with naming_owner(source, "publish a copy (without --move)"), FolderHandle(source) as opened:
                    rename_new(opened, target)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                renamed = False  # from one mount of a filesystem to another
        if not renamed:
            if manifest.nbytes > (free := shutil.disk_usage(folder.path).free):
                raise SpaceError(
                    f"{folder.path.parent}: expected room for {manifest.nbytes:,} bytes, found {free:,} bytes free. "
                    "Free some space, or give --move if the set is on the same filesystem"
                )
            with contextlib.closing(FolderStorage(source)) as storage:
                copier = FileCopier(storage, workers, "shardio-publish", on_progress, manifest.nbytes)
                copier.copy(folder, manifest.files)
            commit_manifest(folder, manifest)
            rename_new(folder, target)
    if move and not renamed:
        try:  # the manifest first: the rest is then no set
            (source / MANIFEST_NAME).unlink()
            fsync_folder(source)
            for entry in manifest.files:
                (source / entry.file).unlink()
        except OSError as error:
            raise ConvertError(
                f"{target} is published, but {source} could not be removed ({error}): remove it yourself"
            ) from None
        with contextlib.suppress(OSError):  # other files in it stay
            source.rmdir()
    return PublishReport(str(target), manifest.digest, len(names), manifest.nbytes, renamed, _readable_by(target))


def _can_be_renamed(source: Path, root: Path) -> bool:
    return source.stat().st_dev == root.stat().st_dev and not source.is_mount()


def _make_movable(source: Path, names: list[str], folder: FolderHandle, file: AtomicFile) -> bool:
    """Gives the set in `source` the permissions of `folder`, and its files `names` those of `file`, both just made.
    Syncs the files. Returns False if a sync fails: the set must then be copied, as another sync would succeed without
    effect.

    Raises FormatError if the set is incomplete, ConvertError if it has other files or permissions cannot be changed.
    """
    sweep_temporaries(source)
    if foreign := sorted(set(os.listdir(source)) - set(names)):
        raise ConvertError(
            f"{source}: expected nothing but the files of the set, found {foreign[0]!r}: remove it, or publish a copy "
            "(without --move)"
        )
    if problems := verify(source, quick=True).problems:
        raise FormatError(problems[0].detail)
    new_folder, new_file = os.fstat(folder.fileno()), os.fstat(file.descriptor)
    hands_on_group = bool(folder.path.parent.stat().st_mode & stat.S_ISGID)
    for path, new in ((source, new_folder), *((source / name, new_file) for name in names)):
        status = path.stat()
        has_other_group = hands_on_group and status.st_gid != new.st_gid
        if not has_other_group and stat.S_IMODE(status.st_mode) == stat.S_IMODE(new.st_mode):
            continue
        problem, way_out = f"{path}: a move must change its permissions or group", "publish a copy (without --move)"
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            raise ConvertError(f"{problem}, but it has a hard link, perhaps in another set: {way_out}")
        try:
            if has_other_group:
                os.chown(path, -1, new.st_gid)
            # After that: chown clears bits.
            os.chmod(path, stat.S_IMODE(new.st_mode))
        except PermissionError:
            raise ConvertError(f"{problem}, but only its owner may change them: {way_out}") from None
    try:
        for name in names:
            fsync_file(source / name)
        fsync_folder(source)
    except OSError:
        return False
    return True


def _readable_by(folder: Path) -> ReadableBy:
    mode, file_mode = folder.stat().st_mode, (folder / MANIFEST_NAME).stat().st_mode  # all files have this mode
    if mode & 0o5 == 0o5 and file_mode & stat.S_IROTH:
        return "all"
    return "group" if mode & 0o50 == 0o50 and file_mode & stat.S_IRGRP else "owner"
