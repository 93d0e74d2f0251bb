#!/usr/bin/env python
"""Lets nodes copy a set together, and breaks one of them at a random moment.

    python tools/chaos/break_nodes.py [--rounds 300] [--nodes 5] [--seed 0]

Each node is a process with a cache of its own. A node is killed, stopped for a while or for good, loses its
connections, gets errors from the source, has a full disk, or gets a damaged byte from the source or from the others; or
the source fails for all. No process may hang, no copy may be published with wrong bytes, and the nodes that nothing
happened to must have the copy. Then the same command is run again, on all nodes: it completes the copies.

Prints how often the source was read, in sizes of the set. Exit code 1 if anything was otherwise. Linux only.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import signal
import socket
import stat
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import attack
import numpy as np
import torch.distributed  # noqa: F401 - once, before the processes fork
from attack import Child, Rounds, Say, Tell, hash_files, make_parser, never_sync, verdict, write_set

from shardio.cache import meeting, partial_copy, together
from shardio.cache import stage as staging
from shardio.cache.meeting import Meeting
from shardio.cache.partial_copy import PartialCopy
from shardio.cache.stage import stage
from shardio.format.entries import FileEntry
from shardio.format.manifest_file import load_manifest
from shardio.sets.storage import FolderStorage

PATCHED_STAGING: Any = staging
PATCHED_MEETING: Any = meeting
PATCHED_TOGETHER: Any = together
PATCHED_PARTIAL: Any = partial_copy

FAULTS = (
    *("nothing", "killed", "stopped", "paused", "cut off", "source", "all sources", "full disk"),
    *("damaged source", "damaged way"),
)
NUM_SAMPLES, SAMPLE_SHAPE, SAMPLES_PER_SHARD = 96, (32, 32, 3), 16
SECONDS_PER_BYTE = 2e-6
# Longer than all waits of a node together.
PATIENCE_SECONDS = 60
DONE, FAILED = 0, 4


@dataclass
class Counts(attack.Counts):
    faults: Counter[str] = field(default_factory=Counter)
    copied: int = 0
    """Nodes that had the copy at the end of the first run."""
    failed: int = 0
    """Nodes that reported an error in the first run."""
    set_nbytes: int = 0
    read_nbytes: list[int] = field(default_factory=list)
    """Bytes read from the source in each round, by the first run."""

    def __str__(self) -> str:
        reads = sorted(nbytes / self.set_nbytes for nbytes in self.read_nbytes)
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(self.faults.items()))
        return (
            f"{kinds}; {self.copied} copies, {self.failed} errors; the source was read {reads[len(reads) // 2]:.2f} "
            f"times ({reads[0]:.2f} to {reads[-1]:.2f})\n{self.rounds} rounds, {len(self.violations)} violations"
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Breaking(Rounds[Counts]):
    def __init__(self, folder: Path, nodes: int, seed: int, say: Say) -> None:
        super().__init__(folder, seed, say, Counts())
        self._nodes = nodes
        self._board = np.frombuffer(mmap.mmap(-1, 8 * nodes), np.int64)
        """The bytes that each node has read from the source."""
        self._source = folder / "source"
        images = np.random.default_rng(seed).integers(0, 256, (NUM_SAMPLES, *SAMPLE_SHAPE), dtype=np.uint8)
        write_set(self._source, images, 5, SAMPLES_PER_SHARD)
        self._expected = hash_files(self._source)
        self._digest = load_manifest(self._source).digest
        self.counts.set_nbytes = load_manifest(self._source).nbytes

    # --- what a node does ------------------------------------------------------------------------------------------

    def _work(self, rank: int, nodes: int, port: int, fault: str, after: float, tell: Tell) -> int:
        never_sync()
        # Blocks of a row and windows of a few of them, so that there are many steps to be broken.
        PATCHED_PARTIAL._LEAST_NBYTES, PATCHED_PARTIAL._PLAIN_NBYTES = 1, 2048
        PATCHED_TOGETHER._FIRST_NBYTES, PATCHED_TOGETHER.MOST_NBYTES = 8 << 10, 16 << 10
        PATCHED_MEETING.SILENT_SECONDS, PATCHED_MEETING.REGROUP_SECONDS = 3.0, 1.5
        PATCHED_MEETING.MEET_SECONDS, PATCHED_MEETING._CONNECT_SECONDS = 10.0, 1.0
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        start = time.monotonic()
        board, strikes = self._board, random.Random(after)

        def due() -> bool:
            return time.monotonic() - start > after

        class Source(FolderStorage):
            def read_into(self, entry: FileEntry, offset: int, buffer: memoryview) -> None:
                time.sleep(len(buffer) * SECONDS_PER_BYTE * nodes)
                if fault in ("source", "all sources") and due():
                    raise OSError(errno.EIO, "on purpose", entry.file)
                board[rank] += len(buffer)
                super().read_into(entry, offset, buffer)
                if fault == "damaged source" and due() and strikes.random() < 0.5:
                    buffer[0] ^= 1

        PATCHED_STAGING.open_storage = Source
        write, gather = PartialCopy.write, meeting.Group.gather

        def full(self: PartialCopy, entry: FileEntry, offset: int, data: memoryview) -> None:
            if due():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(self, entry, offset, data)

        damaged: list[int] = []

        def damaging(self: Any, mine: Any, out: Any) -> None:
            gather(self, mine, out)
            if due() and not damaged and len(out) > 4096:
                damaged.append(len(out))
                out[len(out) // 2] ^= 1

        if fault == "full disk":
            PartialCopy.write = full  # type: ignore[method-assign]
        if fault == "damaged way":
            meeting.Group.gather = damaging  # type: ignore[method-assign]
        if fault == "cut off":
            signal.signal(signal.SIGUSR1, lambda *_: cut_connections())
        try:
            met = Meeting.at(("127.0.0.1", port), rank, nodes)
            stage(self._source, self.folder / f"cache-{self.counts.rounds}-{rank}", together=met, on_message=tell)
        except Exception:
            tell(traceback.format_exc())
            return FAILED
        return DONE

    # --- rounds ----------------------------------------------------------------------------------------------------

    def _run(self, fault: str, victim: int, after: float) -> list[tuple[list[Any], int]]:
        self._board[:] = 0
        port = free_port()
        children = []
        for rank in range(self._nodes):
            mine = fault if rank == victim or fault == "all sources" else "nothing"
            work = partial(self._work, rank, self._nodes, port, mine, after)
            children.append(Child(work, PATIENCE_SECONDS))
        pid = children[victim].pid
        sent = {
            "killed": signal.SIGKILL,
            "stopped": signal.SIGSTOP,
            "paused": signal.SIGSTOP,
            "cut off": signal.SIGUSR1,
        }
        if fault in sent:
            time.sleep(after)
            os.kill(pid, sent[fault])  # it was not waited for, so the number is still its own
        if fault == "paused":
            time.sleep(self._random.random() * 5)
            os.kill(pid, signal.SIGCONT)
        results: list[tuple[list[Any], int]] = []
        for rank, child in enumerate(children):
            if rank != victim:
                results.append(child.finish())
        if fault == "stopped":
            os.kill(pid, signal.SIGKILL)
        results.insert(victim, children[victim].finish())
        return results

    def round(self) -> None:
        counts, rng = self.counts, self._random
        fault, victim = FAULTS[(counts.rounds - 1) % len(FAULTS)], rng.randrange(self._nodes)
        after = rng.random() * rng.choice((0.1, 1.5))  # as they meet, or later
        counts.faults[fault] += 1
        results = self._run(fault, victim, after)
        counts.read_nbytes.append(int(self._board.sum()))
        for rank, (told, code) in enumerate(results):
            hurt = fault == "all sources" or (rank == victim and fault in ("killed", "stopped", "full disk", "source"))
            hurt = hurt or (fault == "damaged source" and code == FAILED and rank == victim)
            # Rank 0 ended before the others met it.
            hurt = hurt or (
                fault in ("killed", "stopped") and not victim and "start all ranks at the same time" in str(told)
            )
            where = f"{fault} at node {victim} after {after:.2f} s"
            what = f"{where}: node {rank} ended with {code}: {''.join(map(str, told))}"
            if code == -signal.SIGALRM:
                self._violation(f"it hangs: {what}")
            elif code != DONE and not hurt:
                self._violation(what)
            counts.copied += code == DONE
            counts.failed += code == FAILED
            self._check(rank, must=code == DONE, what=what)
        for rank, (told, code) in enumerate(self._run("nothing", 0, 0)):
            what = f"after {fault} at node {victim}: node {rank} ended with {code} again: {''.join(map(str, told))}"
            if code != DONE:
                self._violation(what)
            self._check(rank, must=True, what=what)

    def _check(self, rank: int, must: bool, what: str) -> None:
        """Checks that a copy that is published has the right bytes, and that there is one if there `must` be."""
        copy = self.folder / f"cache-{self.counts.rounds}-{rank}" / self._digest
        if not (copy / "manifest.json").exists():
            if must:
                self._violation(f"no copy: {what}")
        elif hash_files(copy) != self._expected:
            self._violation(f"other bytes than the source: {what}")

    def run(self, rounds: int) -> None:
        for number in range(1, rounds + 1):
            self.counts.rounds = number
            self.round()
            for rank in range(self._nodes):
                cache = self.folder / f"cache-{number}-{rank}"
                for path in sorted(cache.rglob("*"), reverse=True):
                    path.rmdir() if path.is_dir() else path.unlink()
            if number % 50 == 0:
                self.say(f"{number} of {rounds} rounds: {len(self.counts.violations)} violations")


def cut_connections() -> None:
    """Ends all connections of this process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        connection.shutdown(socket.SHUT_RDWR)


def break_nodes(rounds: int, nodes: int = 5, seed: int = 0, folder: Path | None = None, say: Say = print) -> Counts:
    """Does so many rounds in `folder`, by default a temporary one. The process must have no other threads."""
    with tempfile.TemporaryDirectory(prefix="break-nodes-", dir=folder) as made:
        breaking = Breaking(Path(made), nodes, seed, say)
        breaking.run(rounds)
    return breaking.counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "the moments")
    parser.add_argument("--rounds", type=int, default=300, help="default %(default)s")
    parser.add_argument("--nodes", type=int, default=5, help="default %(default)s")
    chosen = parser.parse_args(arguments)
    return verdict(break_nodes(chosen.rounds, chosen.nodes, chosen.seed, chosen.folder))


if __name__ == "__main__":
    sys.exit(main())
