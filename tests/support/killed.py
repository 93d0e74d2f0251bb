"""Scripts in processes forked from one that has torch imported, which may be killed at a call that changes files.

    python killed.py

Each line of stdin is a start, as JSON: {"script": path, "words": [...], "folder": path, "ranks": 2, "environ": {...},
"kill": [rank, call], "kept": path, "term": path}. If there is a "kill", each rank writes down in calls-RANK.txt what it
does to files in its folder; `rank`, unless it is null, is killed before its call number `call`, or after half of it
where it writes a file. If there is a folder "kept", its folder NUMBER becomes a copy of what a kill at each call would
have left. The ranks get SIGTERM as soon as "term" exists. Each line of stdout has the ranks' exit codes of a start.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TIMEOUT_SECONDS = 120
# What is imported before the first script that names the package. torch takes seconds to import its compiler when the
# first optimizer is made.
PRELOADED = {
    "torch": ["torch._dynamo", "torch.nn.parallel", "shardio.loading.loader", "shardio.augment"],
    "lightning": ["lightning.pytorch"],
    "accelerate": ["accelerate"],
    "torchmetrics": ["torchmetrics.classification"],
    "transformers": ["transformers.trainer", "transformers.models.resnet.modeling_resnet"],
}
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")


class Calls:
    """Notes what this process does to files in `folder`.

    It ends by SIGKILL at call number `last`. It copies the folder to `kept` at each call.
    """

    def __init__(self, folder: Path, rank: int, last: int | None, kept: Path | None) -> None:
        self._folder = folder
        self._kept = kept
        self._number = -1
        self._log = os.open(folder / f"calls-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._last = last
        self._is_copying = False
        sys.addaudithook(self._on_event)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES or self._is_copying or not (self._folder / arguments[0]).is_relative_to(self._folder):
            return
        is_last = self._is_last(event, *(one for one in arguments if isinstance(one, str | Path)))
        if self._kept:
            self._keep()
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_last(self, *words: object) -> bool:
        self._number += 1
        if self._number == self._last:
            return True
        os.write(self._log, " ".join(map(str, words)).encode() + b"\n")
        return False

    def _keep(self) -> Path:
        """Copies the folder, and returns the copy."""
        assert self._kept is not None
        self._is_copying = True
        copy = shutil.copytree(self._folder, self._kept / str(self._number), symlinks=True)
        self._is_copying = False
        return copy

    def writing(self, write: Callable[..., Any]) -> Callable[..., Any]:
        """`write(what, file or path)`."""

        def call(what: Any, file: Any, *rest: Any, **options: Any) -> None:
            name = file if isinstance(file, Path) else getattr(file, "name", file)
            if not isinstance(name, str | Path):
                write(what, file, *rest, **options)
                return
            path = Path(os.path.abspath(name))
            is_last = self._is_last("write", path)
            write(what, file, *rest, **options)
            if not is_last and not self._kept:
                return
            if name is not file:
                file.flush()
            half = path.stat().st_size // 2
            if self._kept:
                os.truncate(self._keep() / path.relative_to(self._folder), half)
            if is_last:
                os.truncate(path, half)
                os.kill(os.getpid(), signal.SIGKILL)

        return call

    def syncing(self, sync: Callable[[int], object]) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            sync(descriptor)
            os.write(self._log, f"sync {os.readlink(f'/proc/self/fd/{descriptor}')}\n".encode())

        return call


def run_rank(start: dict[str, Any], rank: int, port: int) -> None:
    script, folder = start["script"], Path(start["folder"])
    os.chdir(folder)
    os.environ.update(start["environ"], TMPDIR=str(folder))
    if start["ranks"]:
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": start["ranks"], "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in world.items()}, MASTER_ADDR="127.0.0.1")
    torch.manual_seed(0)
    if kill := start["kill"]:
        with open(f"steps-{rank}.jsonl", "a", encoding="ascii") as file:
            file.write("[]\n")  # where this start begins
        kept = Path(start["kept"]) if start["kept"] else None
        calls = Calls(folder, rank, kill[1] if kill[0] == rank else None, kept)
        torch.save = calls.writing(torch.save)
        if accelerate := sys.modules.get("accelerate.utils.other"):
            accelerate.__dict__["safe_save_file"] = calls.writing(accelerate.__dict__["safe_save_file"])
        os.fsync = calls.syncing(os.fstat)  # a kill does not lose what is not synced
    sys.argv = [script, *start["words"]]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


def fork_rank(start: dict[str, Any], rank: int, port: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.dup2(2, 1)  # a script prints to stderr
        run_rank(start, rank, port)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if code:
            traceback.print_exc()
    except BaseException:
        traceback.print_exc()
    finally:
        # One of gloo's threads may still let go of a Python object when the interpreter is at its end.
        sys.stdout.flush()
        os._exit(code)


def run(start: dict[str, Any]) -> list[int]:
    """The ranks' exit codes. When one has failed, the others are killed, unless all get SIGTERM."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    left = {fork_rank(start, rank, port): rank for rank in range(max(1, start["ranks"]))}
    codes = [0] * len(left)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    term = start["term"]
    while left:
        if term and os.path.exists(term):
            for other in left:
                os.kill(other, signal.SIGTERM)
            term = None
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[left.pop(pid)] = os.waitstatus_to_exitcode(status)
        if (any(codes) and not start["term"]) or time.monotonic() > deadline:  # those with SIGTERM end by themselves
            for other in left:
                os.kill(other, signal.SIGKILL)
        if not pid:
            time.sleep(0.005)
    return codes


def preload(script: str) -> None:
    for package in [package for package in PRELOADED if package in script]:
        for name in PRELOADED.pop(package):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        gc.freeze()  # a collection in a child would copy all that was imported


if __name__ == "__main__":
    for line in sys.stdin:
        start = json.loads(line)
        preload(Path(start["script"]).read_text(encoding="utf-8"))
        print(json.dumps(run(start)), flush=True)
