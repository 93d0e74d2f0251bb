"""Claims the folder OUT for the plan of a conversion, and cleans it up at the end.

An unfinished conversion keeps its plan in OUT/.convert. Another call of the same conversion finds it there and resumes;
a call with other options or sources is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from shardio.conversion.plan import Plan, difference, library_versions
from shardio.errors import ConvertError, FormatError
from shardio.format.layout import MANIFEST_NAME, WORK_FOLDER
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import load_manifest
from shardio.sets.names import PLAN_NAME, check_free
from shardio.system.files import (
    lock_at_once,
    make_folder,
    remove_folder,
    remove_temporaries,
    sweep_temporaries,
    write_atomic,
)
from shardio.system.opening import naming, open_file, read_untrusted

_POLL_SECONDS = 0.2


def published(plan: Plan) -> Manifest | None:
    """Returns the manifest of the set in OUT, or None if OUT has no manifest. Raises ConvertError if the set in OUT was
    not made by this plan."""
    out = plan.out
    if not os.path.lexists(out / MANIFEST_NAME):
        return None
    manifest = load_manifest(out)
    there = manifest.provenance.get("conversion")
    if not isinstance(there, dict):
        raise ConvertError(f"{out}: holds a published set that `convert` did not make. Convert into a new folder")
    if found := difference(there, plan.describe()):
        raise ConvertError(f"{out}: holds a finished set of another conversion ({found}). Convert into a new folder")
    return manifest


@contextlib.contextmanager
def claimed(plan: Plan, has_begun: Callable[[], bool]) -> Iterator[Path | None]:
    """Makes OUT the folder of this plan. Yields the path of this call's run file, which it makes in the work folder.

    While the run file exists, until the `with` block ends, other calls leave the plan in place. Yields None if OUT
    holds the plan's finished set. If the `with` block fails while `has_begun()` still returns False, removes what this
    call made in OUT. Raises ConvertError if OUT holds anything else, such as another conversion.
    """
    out, work = plan.out, plan.out / WORK_FOLDER
    fresh = not (work / PLAN_NAME).exists()
    absent = [folder for folder in (out, *out.parents) if not folder.exists()]
    run_file = work / f"run.{secrets.token_hex(8)}"
    failed = True
    try:
        yield run_file if _claim(plan, run_file) else None
        failed = False
    finally:
        with contextlib.suppress(OSError):
            run_file.unlink(missing_ok=True)
        if failed:
            with contextlib.suppress(OSError, FormatError):  # what is left is an unfinished conversion like any other
                for folder in filter(Path.exists, (out, work)):
                    sweep_temporaries(folder)  # of worker processes that were killed
                if fresh and not has_begun():
                    _take_back(out)
                    for folder in absent:
                        folder.rmdir()


def _claim(plan: Plan, run_file: Path) -> bool:
    """Claims OUT for the plan, and creates `run_file` in its work folder. Returns False if OUT already holds the plan's
    finished set. Raises ConvertError if OUT holds anything else."""
    out, work = plan.out, plan.out / WORK_FOLDER
    try:
        check_free(out)
    except ConvertError:
        if published(plan) is not None:
            return False
        raise
    make_folder(out)
    while True:
        make_folder(work)
        # FileNotFoundError: another call has just taken back what it had begun.
        with contextlib.suppress(FileNotFoundError), naming(run_file):
            open_file(run_file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC).close()
            break
    began = True
    here = {**plan.describe(), "libraries": library_versions()}
    try:
        write_atomic(work / PLAN_NAME, json.dumps(here).encode("ascii"), replace=False)
    except FileExistsError:
        began = False
        there: object = {}
        way_out = ": remove it, or convert into a new folder"
        with contextlib.suppress(ValueError, RecursionError):
            there = json.loads(read_untrusted(work / PLAN_NAME, refusal=ConvertError, way_out=way_out))
        if changed := difference(there if isinstance(there, dict) else {}, here):
            # The other call may be about to find out the same.
            if published(plan) is not None:
                return False
            raise ConvertError(
                f"{out}: holds an unfinished conversion with other options, images or libraries ({changed}). Finish "
                "that conversion with its own options, remove the folder, or convert into a new folder"
            ) from None
    for folder in (work, out):
        sweep_temporaries(folder)
    # A conversion that began before ours may have been published, and its plan removed, since we looked for a set.
    try:
        return published(plan) is None
    except ConvertError:
        if began:
            remove_folder(work)
        raise


@contextlib.contextmanager
def turn(plan: Plan, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Waits until no other process converts the same part of the plan: all ranks of a job may call `convert` at once.

    The lock is a file in the work folder. Its text names the process that holds the lock. If another process holds the
    lock, calls `on_wait` once, with a line that names that process. On a filesystem without locks, or without locks
    between machines, several processes make the same shards, which is only slower. Raises FileNotFoundError if the work
    folder is gone, because another process has published the set.
    """
    path = plan.out / WORK_FOLDER / "part-{}-of-{}.lock".format(*plan.options.part or (1, 1))
    here, told = f"process {os.getpid()} on {ascii(socket.gethostname())[1:-1]}", False
    while True:
        with naming(path), contextlib.ExitStack() as stack:
            file = stack.enter_context(open_file(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC))
            is_free, is_current = True, False
            with contextlib.suppress(OSError):  # no locks here
                is_free = lock_at_once(file.fileno())
            with contextlib.suppress(FileNotFoundError):  # whoever held the lock before has removed its file
                is_current = os.path.samestat(os.fstat(file.fileno()), os.stat(path))
            holder = os.pread(file.fileno(), 1000, 0).decode("ascii", "replace")
            if (is_free and is_current) or holder == here:  # another thread of this process may wait for us
                os.pwrite(file.fileno(), here.encode(), 0)
                os.ftruncate(file.fileno(), len(here))
                stack.pop_all()
                break
        if not told and not is_free:
            on_wait(f"{plan.out}: waiting for {holder or 'another process'}, which is making this set (lock: {path})")
            told = True
        time.sleep(_POLL_SECONDS)
    try:
        yield  # outside of `naming`: its errors are not about the lock
    finally:
        with contextlib.suppress(OSError), file:
            path.unlink(missing_ok=True)
            fcntl.flock(file.fileno(), fcntl.LOCK_UN)  # a process that was forked meanwhile has it, too


def _take_back(out: Path) -> None:
    """Removes the work folder from OUT if OUT and the work folder hold nothing but the plan. Raises OSError, and leaves
    the plan in place, if another call has put a file into the work folder meanwhile."""
    work = out / WORK_FOLDER
    if os.listdir(out) == [WORK_FOLDER] and set(os.listdir(work)) <= {PLAN_NAME}:
        path = work / PLAN_NAME
        plan = read_untrusted(path) if path.exists() else None
        path.unlink(missing_ok=True)
        try:
            work.rmdir()
        except OSError:  # another call has put its mark there, and may have seen the plan
            if plan is not None:
                write_atomic(path, plan, replace=False)
            raise


def leave(out: Path, *, all_done: bool) -> None:
    """Removes the work folder and the temporary files next to the published set, including files of killed processes.

    A process that is still at work, such as a machine believed lost, must not replace a published file. Without the
    work folder it can begin no task, and without its temporary file it can finish none. `all_done` says that this call
    has the records of all tasks: then the temporary files of other machines are removed, too.
    """
    clean = remove_temporaries if all_done else sweep_temporaries
    # A worker whose parent was killed may still put a file in while we remove the others.
    for _ in range(10):
        with contextlib.suppress(OSError):  # the set is there, whatever remains next to it
            remove_folder(out / WORK_FOLDER)
            clean(out)
            if not (out / WORK_FOLDER).exists():
                return
