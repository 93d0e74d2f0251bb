#!/usr/bin/env python
"""Lets nodes copy a set together, and breaks one of them at a random moment.

    python tools/chaos/break_nodes.py [--rounds 300] [--nodes 5] [--seed 0] [--faults intruder liar] [--train]

Each node is a process with a cache of its own. A node is killed, stopped for a while or for good, loses its
connections, gets errors from the source, has a full disk, or gets a damaged byte from the source or from the others; or
the source fails for all. A node lies: it gives wrong bytes, or says what is not so. An intruder, who is no node, sends
garbage and words of its own to all ports that listen, or nothing. No process may hang, no copy may be published with
wrong bytes, and the nodes that nothing happened to must have the copy. Then the same command is run again, on all
nodes: it completes the copies.

With --train, each node reads samples while it copies, as a loader does that does not check them: none may be wrong.

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
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import attack
import numpy as np
import torch.distributed  # once, before the processes fork
from attack import Child, Rounds, Say, Tell, hash_files, make_parser, never_sync, verdict, write_set

from shardio.cache import cached_split, meeting, partial_copy, together
from shardio.cache import stage as staging
from shardio.cache.cached_split import CachedSplit
from shardio.cache.meeting import Meeting
from shardio.cache.partial_copy import PartialCopy
from shardio.cache.stage import stage
from shardio.format.entries import FileEntry
from shardio.format.manifest_file import load_manifest
from shardio.sets.storage import FolderStorage

TORCH: Any = torch.distributed
PATCHED_STAGING: Any = staging
PATCHED_CACHED: Any = cached_split
PATCHED_MEETING: Any = meeting
PATCHED_TOGETHER: Any = together
PATCHED_PARTIAL: Any = partial_copy

FAULTS = (
    *("nothing", "killed", "stopped", "paused", "cut off", "source", "all sources", "full disk"),
    *("damaged source", "damaged way", "liar", "intruder"),
)
GARBAGE = (
    *(b"", b"\0", bytes(64), b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n", bytes(8) + b"\xff" * 100, b"\3" + bytes(300)),
    *(b"\0" + (1 << 40).to_bytes(8, "little") * 3, b"\1\5\0\0\0\0\0\0\0abcde" + (1 << 45).to_bytes(8, "little")),
)
WORDS = (
    *("null", "5", "{[", "[" * 100000, "[3]", '"\x1b[2J"', '{"0": null}', '{"1": {"rank": 1}}', "{}", "x" * (1 << 20)),
    '{"rank": 1, "name": "\\u001b[2J", "host": "127.0.0.1", "port": 1, "digest": "a"}',
    '{"0": {"rank": 0, "name": "a", "host": "127.0.0.1", "port": 1, "digest": "a"}}',
)
NUM_SAMPLES, SAMPLE_SHAPE, SAMPLES_PER_SHARD = 96, (32, 32, 3), 16
SECONDS_PER_BYTE = 2e-6
# Longer than all waits of a node together.
PATIENCE_SECONDS = 60
DONE, FAILED = 0, 4
WRONG = "wrong samples"


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
    def __init__(
        self, folder: Path, nodes: int, seed: int, say: Say, faults: Sequence[str] = FAULTS, trains: bool = False
    ) -> None:
        super().__init__(folder, seed, say, Counts())
        self._nodes, self._faults, self._trains = nodes, faults, trains
        self._board = np.frombuffer(mmap.mmap(-1, 8 * nodes), np.int64)
        """The bytes that each node has read from the source."""
        self._source = folder / "source"
        images = np.random.default_rng(seed).integers(0, 256, (NUM_SAMPLES, *SAMPLE_SHAPE), dtype=np.uint8)
        write_set(self._source, images, 5, SAMPLES_PER_SHARD)
        self._images = images
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

        PATCHED_STAGING.open_storage = PATCHED_CACHED.open_storage = Source
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

        read, say = together.Together._read, together.Together._tell

        def lying(self: Any, plan: Any) -> Any:
            out = read(self, plan)
            if due() and len(out) and strikes.random() < 0.7:
                out[strikes.randrange(len(out)) if strikes.random() < 0.5 else slice(None)] ^= 1
            return out

        def pretending(self: Any, mine: Any) -> Any:
            if due() and len(mine) > 8 and strikes.random() < 0.2:
                mine = mine.copy()
                word = strikes.choice((np.nan, np.inf, -1e30, 1.0))
                mine[:4] = np.array([word], np.float32).view(np.uint8)
                mine[8:] = strikes.choice((0, 255, strikes.randrange(256)))
            return say(self, mine)

        if fault == "liar":
            together.Together._read = lying  # type: ignore[method-assign]
            together.Together._tell = pretending  # type: ignore[method-assign]
        if fault == "full disk":
            PartialCopy.write = full  # type: ignore[method-assign]
        if fault == "damaged way":
            meeting.Group.gather = damaging  # type: ignore[method-assign]
        if fault == "cut off":
            signal.signal(signal.SIGUSR1, lambda *_: cut_connections())
        try:
            met = Meeting.at(("127.0.0.1", port), rank, nodes)
            cache = self.folder / f"cache-{self.counts.rounds}-{rank}"
            if self._trains:
                self._train(cache, met, strikes, tell)
            stage(self._source, cache, together=None if self._trains else met, on_message=tell)
        except Exception:
            tell(traceback.format_exc())
            return FAILED
        return DONE

    def _train(self, cache: Path, met: Meeting, rng: random.Random, tell: Tell) -> None:
        """Reads samples until the copy is complete, and tells how many are wrong."""
        wrong = 0
        with contextlib.closing(CachedSplit(self._source, cache, "train", meeting=met)) as split:
            split.open()
            reader = split.make_reader("auto", NUM_SAMPLES)
            while split.describe()["staging"]["state"].startswith("cop"):
                indices = np.array(rng.sample(range(NUM_SAMPLES), 8))
                out = np.empty((8, *SAMPLE_SHAPE), np.uint8)
                reader.copy("", indices, out)
                wrong += int((out != self._images[indices]).any(axis=(1, 2, 3)).sum())
        if wrong:
            tell(f"{WRONG}: {wrong}")

    def _intrude(self, port: int, pids: Sequence[int], seed: float) -> None:
        rng, held, limit = random.Random(seed), list[socket.socket](), timedelta(seconds=1)
        names = [f"shardio///{name}{rank}" for name in ("form", "agree") for rank in ("", "/0", "/1", "/2")]
        while True:
            for place in listening(pids):
                with contextlib.suppress(OSError):
                    held.append(socket.create_connection(("127.0.0.1", place), 0.3))
                    held[-1].sendall(rng.choice((*GARBAGE, rng.randbytes(5000), bytes([rng.randrange(8)]) + bytes(60))))
                if len(held) > 100 or (held and rng.random() < 0.3):
                    held.pop(rng.randrange(len(held))).close()
            with contextlib.suppress(RuntimeError, OSError):
                store = TORCH.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=limit)
                for _ in range(5):
                    store.set(rng.choice(names), rng.choice(WORDS))
            time.sleep(rng.random() * 0.02)

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
        intruder = None
        if fault == "intruder":
            time.sleep(after)
            pids = [child.pid for child in children]
            intruder = Child(lambda tell: self._intrude(port, pids, after), PATIENCE_SECONDS)
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
        if intruder is not None:
            os.kill(intruder.pid, signal.SIGKILL)
            intruder.finish()
        return results

    def round(self) -> None:
        counts, rng = self.counts, self._random
        fault, victim = self._faults[(counts.rounds - 1) % len(self._faults)], rng.randrange(self._nodes)
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
            hurt = hurt or (rank == victim and code == -signal.SIGUSR1)  # cut off before it was ready for it
            if self._trains and fault in ("intruder", "killed", "stopped", "paused", "cut off"):
                # A loader does not begin without the others.
                words = ("make their loaders in the same order", "start all ranks at the same time")
                hurt = hurt or any(each in str(told) for each in words)
            where = f"{fault} at node {victim} after {after:.2f} s"
            what = f"{where}: node {rank} ended with {code}: {''.join(map(str, told))}"
            if code == -signal.SIGALRM:
                self._violation(f"it hangs: {what}")
            elif (code != DONE and not hurt) or WRONG in str(told):
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


def listening(pids: Sequence[int]) -> list[int]:
    """Returns the ports at which these processes listen."""
    mine = set[str]()
    for pid in pids:
        with contextlib.suppress(OSError):
            mine |= {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(each[1].partition(":")[2], 16) for each in lines if each[3] == "0A" and f"socket:[{each[9]}]" in mine]


def break_nodes(
    rounds: int,
    nodes: int = 5,
    seed: int = 0,
    folder: Path | None = None,
    faults: Sequence[str] = FAULTS,
    trains: bool = False,
    say: Say = print,
) -> Counts:
    """Does so many rounds in `folder`, by default a temporary one. The process must have no other threads."""
    with tempfile.TemporaryDirectory(prefix="break-nodes-", dir=folder) as made:
        breaking = Breaking(Path(made), nodes, seed, say, faults, trains)
        breaking.run(rounds)
    return breaking.counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "the moments")
    parser.add_argument("--rounds", type=int, default=300, help="default %(default)s")
    parser.add_argument("--nodes", type=int, default=5, help="default %(default)s")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS, help="default: all")
    parser.add_argument("--train", action="store_true", help="read samples meanwhile")
    chosen = parser.parse_args(arguments)
    return verdict(break_nodes(chosen.rounds, chosen.nodes, chosen.seed, chosen.folder, chosen.faults, chosen.train))


if __name__ == "__main__":
    sys.exit(main())
