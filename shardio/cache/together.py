"""Copies a set to the nodes of a group: one node reads each byte from the source, and all nodes pass it on.

The nodes go through the files in windows, a few MiB each. For each window, the nodes tell each other which blocks they
have. The bytes that some node lacks are split into equal shares, one for each node. A node reads its share from the
source, or gets it from a node that has it. Then gloo gathers all shares on all nodes, in a ring, so each link carries
about as many bytes as the window has, however many nodes there are. While a window is gathered, the shares of the next
windows are read, and the previous window is written. A file that came wrong is read by one node and sent to each other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.cache.meeting import Group, GroupBrokenError
from shardio.cache.partial_copy import COMING, MISSING, THERE, PartialCopy
from shardio.errors import first_of
from shardio.format.entries import FileEntry
from shardio.sets.storage import FolderStorage, Storage
from shardio.system.opening import FolderHandle
from shardio.system.threads import Call, ThreadPool

# Up to eight windows are in memory: one that is gathered, gloo's copy of it, and two that are written; and what this
# node has read for four, which is a share of each, or all of it if no other node has anything.
MOST_NBYTES = 32 << 20
_MOST_SHARE_NBYTES = 4 << 20
_FIRST_NBYTES = 2 << 20
# Windows grow and shrink so that reading a share takes about this long.
_READ_SECONDS = 0.25
# Windows whose shares are being read while another one is gathered.
AHEAD = 3
# How often damaged files are fetched again.
_MOST_PASSES = 3
# A node is left behind if it needs so many times the median time of all, and has cost so many seconds.
_SLOW_RATIO = 4.0
_SLOW_SECONDS = 15.0
# What one window counts at most: a node that was stopped for a while is as fast as the others afterwards.
_LONGEST_SECONDS = 5.0

NDBytes = NDArray[np.uint8]
Block = tuple[FileEntry, int, int]
"""A block, as (file, start, stop): the bytes [start, stop) of the file."""


@dataclass(frozen=True)
class Piece:
    """Consecutive bytes of one file: node number `owner` reads them, from the source or from its own copy
    (`from_source`), and node number `share` passes them on."""

    entry: FileEntry
    start: int
    """The offset of the bytes in the file."""
    nbytes: int
    owner: int
    share: int
    from_source: bool


@dataclass(frozen=True)
class WindowPlan:
    """The plan of a window: which node reads which bytes, and passes them on. All nodes make the same plan."""

    pieces: tuple[Piece, ...]
    """In order: the window is the bytes of these pieces, one after the other."""
    share_nbytes: int
    """The bytes of each node's share. The last share may be shorter, and is padded."""
    sender: int | None = None
    """The node that reads all pieces, and sends them to each other node itself; None if nodes pass on shares."""

    def counts(self, num_nodes: int) -> NDArray[np.int64]:
        """Returns int64 (nodes, nodes): at [i, j], how many bytes node i reads that are in the share of node j."""
        found = np.zeros((num_nodes, num_nodes), np.int64)
        for piece in self.pieces:
            found[piece.owner, piece.share] += piece.nbytes
        return found


class Run(NamedTuple):
    """The bytes [start, stop) of one file, which a node reads from the source or from its own copy (`from_source`)."""

    entry: FileEntry
    start: int
    stop: int
    place: int
    """The offset of the bytes among the bytes of all pieces."""
    from_source: bool


def joined(pieces: Sequence[Piece]) -> list[Run]:
    """Returns the bytes of `pieces` as runs: pieces that follow each other in a file become one run.

    Bytes that are read from the source and bytes that are read from a copy are never in one run.
    """
    runs: list[Run] = []
    place = 0
    for piece in pieces:
        stop = piece.start + piece.nbytes
        last = runs[-1] if runs else None
        if last and (last.entry, last.stop, last.from_source) == (piece.entry, piece.start, piece.from_source):
            runs[-1] = last._replace(stop=stop)
        else:
            runs.append(Run(piece.entry, piece.start, stop, place, piece.from_source))
        place += piece.nbytes
    return runs


def plan_window(blocks: Sequence[Block], has: NDArray[np.bool_], readers: Sequence[int], turn: int = 0) -> WindowPlan:
    """Returns the plan of a window of `blocks`. `has`, bool (nodes, blocks), is true where a node has a block.

    `readers` are the nodes that can read from the source. `turn` is the number of the pass over the files, from 0. In
    each later pass, one reader, every time another, reads and sends everything: a reader may get damaged bytes.
    """
    num_nodes = len(has)
    wanted = np.flatnonzero(~has.all(axis=0)).tolist()
    total = sum(blocks[number][2] - blocks[number][1] for number in wanted)
    share_nbytes = -(-total // num_nodes)
    sender = readers[turn % len(readers)] if turn else None
    pieces: list[Piece] = []
    done = 0
    for number in wanted:
        entry, start, stop = blocks[number]
        owners = [] if turn else np.flatnonzero(has[:, number]).tolist()
        while start < stop:
            share = done // share_nbytes
            nbytes = min(stop - start, (share + 1) * share_nbytes - done)
            if sender is not None:
                owner = share = sender
            elif owners:
                owner = share if share in owners else owners[number % len(owners)]
            else:
                owner = share if share in readers else readers[share % len(readers)]
            pieces.append(Piece(entry, start, nbytes, owner, share, not owners))
            start, done = start + nbytes, done + nbytes
    return WindowPlan(tuple(pieces), share_nbytes, sender)


def add_lost(lost: NDArray[np.float64], seconds: NDArray[np.float32]) -> int | None:
    """Adds to `lost` how many seconds each node has cost the others by being slow; 0 for a node that is not slow.

    `seconds`, (nodes,), is what each node needed for the last window. Returns a node to leave behind, or None.
    """
    more = np.minimum(seconds, _LONGEST_SECONDS) - _SLOW_RATIO * float(np.median(seconds))
    lost[:] = np.where(more > 0, lost + more, 0)
    return int(lost.argmax()) if lost.max() > _SLOW_SECONDS else None


class LeftBehindError(Exception):
    """This node is so slow that the other nodes continue without it."""


@dataclass(eq=False)
class Together:
    """Fetches the missing files of `partial` with the other nodes of `group`, when `run` is called.

    `files` are all files of the set, in the same order on all nodes. Threads call `finish` with each file whose blocks
    are all THERE; it returns whether the file's sha256 is right. Threads call `on_progress` with the number of bytes
    just written. `on_message` gets a sentence about nodes that sent wrong bytes. `folder` is the folder of the copy.
    """

    group: Group
    storage: Storage
    partial: PartialCopy
    folder: FolderHandle
    files: Sequence[FileEntry]
    finish: Callable[[FileEntry], bool]
    on_progress: Callable[[int], object]
    on_message: Callable[[str], object]

    def __post_init__(self) -> None:
        self._copy = FolderStorage(self.folder)
        self._finishing: dict[FileEntry, Call[bool]] = {}
        self._complete = {entry: not self.partial.has(entry) for entry in self.files}
        self._unchecked = {entry for entry in self.files if self._complete[entry]}
        self._planned: deque[tuple[WindowPlan, Call[NDBytes]]] = deque()
        """The plans of the windows that are not passed on yet, each with the call that reads this node's bytes."""
        self._windows = deque([np.zeros(0, np.uint8)] * 3)
        self._came: dict[FileEntry, list[tuple[int, int, WindowPlan]]] = {}
        """What this pass has written into each unfinished file: (begin, end, plan) for the bytes [begin, end)."""
        self._before = self._came
        self._givers: dict[FileEntry, list[set[int]]] = {}
        """For each piece whose bytes differ from those of the last pass: the nodes that gave it in the last pass."""

    def run(self) -> None:
        """Fetches files until all nodes have all files, in at most `_MOST_PASSES` passes.

        Raises GroupBrokenError if a node has ended, LeftBehindError if this node is too slow, and OSError if no node
        can read from the source, or if the disk of this node is full.
        """
        with (
            ThreadPool(AHEAD, "shardio-stage-read") as self._readers,
            ThreadPool(1, "shardio-stage-write") as self._writers,
            ThreadPool(2, "shardio-stage-finish") as self._finishers,
        ):
            try:
                for turn in range(_MOST_PASSES):
                    complete = self._tell(np.array([*map(self._complete.get, self.files)], np.uint8)).all(axis=0)
                    if complete.all():
                        break
                    files = [self.files[number] for number in np.flatnonzero(~complete).tolist()]
                    self._before, self._came, self._givers, self._finishing = self._came, {}, {}, {}
                    self._nbytes = _FIRST_NBYTES
                    for entry in self._unchecked.intersection(files if turn else ()):  # it came wrong to another node
                        self._finishing[entry] = self._finishers.submit(self.finish, entry)
                        self._unchecked.remove(entry)
                    self._pass(files, turn)
            except BaseException:
                self.group.leave()
                for plan, _ in self._planned:  # nobody fetches them any more
                    self._mark(plan, MISSING)
                raise

    def _tell(self, mine: NDBytes) -> NDBytes:
        """Sends `mine`, uint8 (n,), to all nodes. Returns the `mine` of every node, uint8 (nodes, n)."""
        out = np.empty(len(self.group) * len(mine), np.uint8)
        self.group.gather(mine, out)
        return out.reshape(len(self.group), -1)

    def _pass(self, files: Sequence[FileEntry], turn: int) -> None:
        """Fetches the missing blocks of `files`, window by window. `turn` is the number of the pass, from 0.

        Blocks that a node fails to read stay MISSING. A message names the nodes that gave wrong bytes in the last pass.
        """
        planned = self._planned
        lost, can_read = np.zeros(len(self.group)), np.ones(len(self.group), bool)
        writing: deque[Call[None]] = deque()
        cursor, seconds = (0, 0), 0.0
        while planned or cursor[0] < len(files):
            due = planned[0] if len(planned) == AHEAD or cursor[0] == len(files) else None
            error, owned = None, np.zeros(0, np.uint8)
            start = time.monotonic()
            try:
                if due is not None:
                    owned = due[1].result()
            except OSError as failure:
                error = failure
            seconds += time.monotonic() - start
            blocks, cursor = self._next_window(files, cursor)
            # Of a block that a process of this node fetches for a sample, this node will have the bytes.
            has = [self._complete[block[0]] or self.partial.states_of(*block)[0] != MISSING for block in blocks]
            head = np.array([seconds, error is not None], np.float32).view(np.uint8)
            told = self._tell(np.concatenate([head, np.packbits(np.array(has, bool))]))
            heads = told[:, :8].copy().view(np.float32)
            can_read &= heads[:, 1] == 0
            if not turn:  # else one node reads all
                if (behind := add_lost(lost, heads[:, 0])) is not None:
                    raise LeftBehindError if behind == self.group.rank else GroupBrokenError("another node is too slow")
                # The size of the next window, from the seconds that the slowest node needed for the last window.
                if heads[:, 0].max() > 2 * _READ_SECONDS:
                    self._nbytes = max(_FIRST_NBYTES, self._nbytes // 2)
                elif heads[:, 0].max() < _READ_SECONDS / 2:
                    self._nbytes = min(2 * self._nbytes, MOST_NBYTES, len(self.group) * _MOST_SHARE_NBYTES)
            if due is not None:
                if heads[:, 1].any():
                    self._mark(due[0], MISSING)  # a node could not read its share: the window is fetched again
                else:
                    window = self._pass_on(due[0], owned)
                    start = time.monotonic()
                    if len(writing) > 1:
                        writing.popleft().result()
                    seconds = time.monotonic() - start
                    writing.append(self._writers.submit(self._write, due[0], window))
                planned.popleft()
            if error is not None and not can_read.any():
                raise error
            if blocks:
                everyone = np.unpackbits(told[:, 8:], axis=1, count=len(blocks)).astype(bool)
                plan = plan_window(blocks, everyone, np.flatnonzero(can_read).tolist() or [0], turn)
                self._mark(plan, COMING)
                planned.append((plan, self._readers.submit(self._read, plan)))
        for written in writing:
            written.result()
        for entry in files:
            self._finish_if_there(entry)
        for entry, call in self._finishing.items():
            self._complete[entry] = call.result()
        if mended := [entry for entry in self._givers if self._complete[entry]]:
            givers = [nodes for entry in mended for nodes in self._givers[entry]]
            numbers = sorted(set.intersection(*givers) or set.union(*givers))
            names = " or ".join(str(self.group.members[number]) for number in numbers)
            wrong = first_of([entry.file for entry in mended], 3)
            self.on_message(f"wrong bytes came from {names}, in {wrong}: one node read them again for all")

    def _next_window(self, files: Sequence[FileEntry], cursor: tuple[int, int]) -> tuple[list[Block], tuple[int, int]]:
        """Returns the blocks of the next window, and the cursor after it: (position in `files`, number of a block)."""
        number, block = cursor
        found, nbytes = list[Block](), 0
        while number < len(files) and nbytes < self._nbytes:
            blocks = self.partial.blocks[files[number]]
            found.append((files[number], blocks.start(block), blocks.start(block + 1)))
            nbytes += found[-1][2] - found[-1][1]
            number, block = (number, block + 1) if block + 1 < blocks.count else (number + 1, 0)
        return found, (number, block)

    def _mark(self, plan: WindowPlan, state: int) -> None:
        """Sets the state of the blocks of `plan` that this node lacks, so other processes of the node see it."""
        for run, begin, end in self._lacking(plan):
            self.partial.mark(run.entry, state, begin, end)

    def _lacking(self, plan: WindowPlan) -> Iterator[tuple[Run, int, int]]:
        """Yields (run, begin, end) for the bytes [begin, end) of each run of `plan` that this node's copy lacks."""
        for run in joined(plan.pieces):
            if not self._complete[run.entry]:
                for begin, end, state in self.partial.runs(run.entry, run.start, run.stop):
                    if state != THERE:
                        yield run, begin, end

    def _read(self, plan: WindowPlan) -> NDBytes:
        """Returns the bytes of the pieces in `plan` that this node owns, one after the other. Runs in a thread."""
        owned = [piece for piece in plan.pieces if piece.owner == self.group.rank]
        out = np.empty(sum(piece.nbytes for piece in owned), np.uint8)
        for entry, start, stop, place, from_source in joined(owned):
            buffer = out[place : place + stop - start].data
            if not from_source and not self._complete[entry]:
                self.partial.wait(entry, start, stop)
                from_source = bool((self.partial.states_of(entry, start, stop) != THERE).any())
            if from_source:
                self.storage.read_into(entry, start, buffer)
                continue
            try:
                self.partial.read(entry, start, buffer)
            except FileNotFoundError:  # it is complete, perhaps since a moment
                self._copy.read_into(entry, start, buffer)
        return out

    def _pass_on(self, plan: WindowPlan, owned: NDBytes) -> NDBytes:
        """Gives `owned`, the bytes that this node has read, to the others. Returns the whole window, and padding."""
        num_nodes, rank = len(self.group), self.group.rank
        nbytes = num_nodes * plan.share_nbytes
        # One is gathered, and two may still be written. New memory for each window would cost more than to copy it.
        self._windows.rotate()
        if len(self._windows[0]) < nbytes:
            self._windows[0] = np.empty(nbytes, np.uint8)
        window = self._windows[0][:nbytes]
        if plan.sender is not None:
            self.group.scatter(owned, plan.sender, window[: sum(piece.nbytes for piece in plan.pieces)])
            return window
        share = np.zeros(plan.share_nbytes, np.uint8)
        counts = plan.counts(num_nodes)
        if counts.sum() > counts.trace():  # a node has bytes for the share of another one
            received = np.empty(int(counts[:, rank].sum()), np.uint8)
            self.group.exchange(owned, counts[rank].tolist(), received, counts[:, rank].tolist())
            # By owner; the pieces of each owner are in the order of the window.
            places, done = [0, *counts[:, rank].cumsum().tolist()], 0
            for piece in plan.pieces:
                if piece.share == rank:
                    place = places[piece.owner]
                    share[done : done + piece.nbytes] = received[place : place + piece.nbytes]
                    places[piece.owner], done = place + piece.nbytes, done + piece.nbytes
        else:
            share[: len(owned)] = owned
        if nbytes:
            self.group.gather(share, window)
        return window

    def _write(self, plan: WindowPlan, window: NDBytes) -> None:
        """Writes the bytes of `window` that this node lacks into the copy. Runs in a thread."""
        for run, begin, end in self._lacking(plan):
            data = window[run.place :][begin - run.start : end - run.start]
            if run.entry in self._before:
                self._compare(run.entry, begin, data)
            self.partial.write(run.entry, begin, data.data)
            self._came.setdefault(run.entry, []).append((begin, end, plan))
            self.on_progress(end - begin)
        for entry in dict.fromkeys(piece.entry for piece in plan.pieces):
            self._finish_if_there(entry)

    def _compare(self, entry: FileEntry, begin: int, data: NDBytes) -> None:
        """Compares `data`, a file's bytes from `begin` on, with the unfinished file, which has the bytes of the last
        pass. Notes the nodes that gave bytes that differ."""
        there = np.empty_like(data)
        self.partial.read(entry, begin, there.data)
        for start, stop, plan in self._before[entry]:
            for piece in plan.pieces:
                span = slice(max(0, piece.start - begin), max(0, piece.start + piece.nbytes - begin))
                if piece.entry == entry and start <= piece.start < stop and (there[span] != data[span]).any():
                    self._givers.setdefault(entry, []).append({piece.owner, piece.share})

    def _finish_if_there(self, entry: FileEntry) -> None:
        is_begun = self._complete[entry] or entry in self._finishing
        if not is_begun and (self.partial.states_of(entry, 0, entry.nbytes) == THERE).all():
            self._finishing[entry] = self._finishers.submit(self._finish, entry)

    def _finish(self, entry: FileEntry) -> bool:
        if is_right := self.finish(entry):
            self._came.pop(entry, None)
        return is_right
