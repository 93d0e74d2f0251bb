"""Lets the nodes of a job meet, agree on a set, and exchange bytes, also after some nodes have ended.

The ranks meet at a store of torch.distributed, a server of keys and values, where rank 0 decides. One rank of each node
then joins a group of gloo, which moves bytes. A group cannot shrink. When a node ends, the other nodes get an error and
form a new group, at a store that one of them has hosted since the beginning: the first in rank order that answers. That
node decides which nodes are in the new group.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardio.errors import LaunchError
from shardio.system.threads import Call, DaemonThread, Flag

T = TypeVar("T")

# Processes of a step start within this time of each other.
MEET_SECONDS = 120.0
# A node that gives no byte for so long has ended, or is too slow for the others.
SILENT_SECONDS = 30.0
# Nodes notice the end of another one within this time of each other.
REGROUP_SECONDS = 10.0
_CONNECT_SECONDS = 3.0
_ATTEMPTS = 4
_POLL_SECONDS = 0.01


# How many members are asked to form the next group, before a node goes on alone.
_MOST_HOSTS = 3


class GroupBrokenError(RuntimeError):
    """Another node has ended or does not answer, or this node was told to stop."""


def rendezvous_of(text: str | None, environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Returns the host and port where the ranks of a job meet.

    They come from `text`, HOST:PORT; or else from MASTER_ADDR and MASTER_PORT; or else they are the first host of the
    SLURM step, and a port computed from the ids of the job and step. Raises LaunchError if none of these is given, or
    the port is not a number from 1 to 65535.
    """
    if text is None and "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        text = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    if text is None and (first := re.match(r"([^\[,]|\[[^\]]*\])+", hosts)):  # a1, a[1-3,7], a[1-2]b[3-4], or a list
        job, step = (int(environ.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        # Below the ports that systems give to connections.
        host = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])
        text = f"{host}:{15000 + (job * 31 + step) % 17000}"
    host, _, port = (text or "").rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise LaunchError(
            f"expected the address of rank 0, where the nodes meet, as HOST:PORT, found {text!r}: give it by "
            "--rendezvous, or set MASTER_ADDR and MASTER_PORT"
        )
    return host.strip("[]"), int(port)


@dataclass(frozen=True)
class Member:
    """A node of a group: its rank, its hostname, and the address of the store that it hosts."""

    rank: int
    name: str
    host: str
    port: int


class Meeting:
    """The ranks of a job, which meet at `store`, a store of torch.distributed.

    All ranks must make the same calls in the same order. One thread at a time may use a Meeting.
    """

    def __init__(self, store: Any, rank: int, world_size: int, host: str) -> None:
        self.rank = rank
        self._store = store
        self._ranks = list(range(world_size))
        self._host = _own_address(host)
        self.stop: Flag = Flag()
        """Setting this flag ends all waiting."""
        self._own: Any = None
        self._generation = 0

    @classmethod
    def at(
        cls,
        rendezvous: tuple[str, int],
        rank: int,
        world_size: int,
        on_message: Callable[[str], object] = lambda text: None,
    ) -> Meeting:
        """Returns the meeting at `rendezvous`, a host and port where rank 0 listens.

        Calls `on_message` with a sentence at once if the host's name does not resolve. Raises LaunchError if rank 0
        cannot listen there, or does not answer within 120 seconds.
        """
        host, port = rendezvous
        _wait_for_name(host, on_message)
        # torchrun listens at MASTER_PORT by itself.
        hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        for attempt in reversed(range(_ATTEMPTS)):  # one whose connection is cut may wait until its time is over
            try:
                store = _store(host, port, MEET_SECONDS / _ATTEMPTS, hosts=hosts)
                break
            except (RuntimeError, OSError) as error:
                if hosts or not attempt:
                    raise LaunchError(
                        f"{host}:{port}: cannot meet the ranks within {MEET_SECONDS:.0f} seconds ({_line(error)}): "
                        "start all ranks at the same time, or give another address of rank 0 by --rendezvous"
                    ) from None
        # A store that torchrun keeps has what the ranks said before a restart. Two jobs may have chosen the same port.
        restart, job = (os.environ.get(name, "") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID"))
        return cls(_torch().PrefixStore(f"shardio{restart}/{job}/", store), rank, world_size, host)

    def agree(self, what: Mapping[str, str], *, needs_all: bool) -> None:
        """Raises LaunchError, at all ranks, unless all ranks call this with the same `what`.

        With `needs_all`, also raises LaunchError if a rank ends or does not call this within 120 seconds. Without,
        ignores missing ranks, but raises GroupBrokenError if rank 0 does not answer.
        """

        def decide(found: dict[int, Any]) -> tuple[str, Mapping[str, str]]:
            problem = next(filter(None, (_difference(rank, other, what) for rank, other in found.items())), "")
            if needs_all and (missing := [rank for rank in self._ranks if rank not in found]):
                count, seconds = len(self._ranks), f"{MEET_SECONDS:.0f} seconds"
                problem = f"expected {count} ranks within {seconds}, ranks {missing} are missing"
            return problem, what

        try:
            problem, decided = self._decide(self._store, "agree", self._ranks, 0, dict(what), decide, MEET_SECONDS)
            # A rank of another job may come to the same port after the ranks of this job have agreed.
            problem = problem or _difference(self.rank, what, decided)
        except (RuntimeError, OSError) as error:
            problem = f"rank 0 does not answer: {_line(error)}"
            if not needs_all:
                raise GroupBrokenError(problem) from None
        if problem:
            raise LaunchError(
                f"{problem}: all ranks must copy the same set together, and make their loaders in the same order; two "
                "jobs need two addresses, which --rendezvous gives"
            )

    def form(self, fills: bool) -> Group | None:
        """Returns the group of the ranks that call this with `fills`; None if this rank is not in it, or is alone.

        At most one rank of each node has `fills`. Leaves out ranks that do not call this within 120 seconds. Without
        `fills`, only rank 0 waits for the others. Raises GroupBrokenError if rank 0 does not answer.
        """
        mine = None
        if fills:
            self._own = _store(self._host, 0, SILENT_SECONDS, hosts=True)
            mine = vars(Member(self.rank, socket.gethostname(), self._host, self._own.port))

        def decide(found: dict[int, Any]) -> list[Any]:
            return [found[rank] for rank in self._ranks if found.get(rank) is not None]

        try:
            if not fills and self.rank:
                self._store.set(f"form/{self.rank}", json.dumps(None))
                return None
            found = self._decide(self._store, "form", self._ranks, 0, mine, decide, MEET_SECONDS)
        except (RuntimeError, OSError) as error:
            raise GroupBrokenError(f"rank 0 does not answer: {_line(error)}") from None
        members = [Member(**each) for each in found]
        return self._group(members, members[0]) if fills and members else None

    def regroup(self, members: Sequence[Member], *, again: bool = True) -> Group | None:
        """Returns a new group of those `members` that call this within 10 seconds; None if this rank is alone.

        `members` are the members of the broken group. With `again`, tries once more if gloo cannot make the group.
        """
        ranks = [member.rank for member in members]
        self._generation += 1
        name = f"regroup{self._generation}"
        for host in members[:_MOST_HOSTS]:
            try:
                store = self._store_of(host, _CONNECT_SECONDS)
                found = self._decide(store, name, ranks, host.rank, True, sorted, REGROUP_SECONDS)
            except (RuntimeError, OSError):
                continue  # it has ended, too
            return self._group([member for member in members if member.rank in found], host, again=again)
        return None

    def _group(self, members: Sequence[Member], host: Member, *, again: bool = True) -> Group | None:
        """Returns the gloo group of `members`, made at the store of `host`; None if this rank is not in it or alone."""
        ranks = [member.rank for member in members]
        if self.rank not in ranks or len(ranks) == 1:
            return None
        torch = _torch()
        try:
            store = torch.PrefixStore(f"gloo{self._generation}/", self._store_of(host, SILENT_SECONDS))
            limit = timedelta(seconds=SILENT_SECONDS)
            make = partial(torch.ProcessGroupGloo, store, ranks.index(self.rank), len(ranks), limit)
            gloo = _within(2 * SILENT_SECONDS, make, self.stop)
        except (RuntimeError, OSError):
            return self.regroup(members, again=False) if again else None
        return Group(gloo, ranks.index(self.rank), tuple(members), self.stop)

    def _store_of(self, host: Member, seconds: float) -> Any:
        return self._own if host.rank == self.rank else _store(host.host, host.port, seconds)

    def _decide(
        self,
        store: Any,
        name: str,
        ranks: Sequence[int],
        decider: int,
        mine: Any,
        decide: Callable[[dict[int, Any]], Any],
        seconds: float,
    ) -> Any:
        """Returns the result of `decide`, which rank `decider` calls with {rank: that rank's `mine`}.

        The dict lacks ranks that do not send their value, as JSON, within `seconds`. The decider returns after the
        other ranks have read the result, or 10 seconds later. Raises RuntimeError if the store or the decider does not
        answer.
        """

        def ask() -> Any:
            store.set(f"{name}/{self.rank}", json.dumps(mine))
            deadline = time.monotonic() + seconds
            if self.rank == decider:
                found: dict[int, Any] = {}
                while len(found) < len(ranks) and time.monotonic() < deadline:
                    for rank in ranks:
                        if rank not in found and store.check([f"{name}/{rank}"]):
                            found[rank] = json.loads(store.get(f"{name}/{rank}"))
                    self._pause()
                store.set(name, json.dumps(decide(found)))
                # The store may end with this process, so the others read the decision first.
                readers = [rank for rank, word in found.items() if rank != decider and word is not None]
                deadline = time.monotonic() + REGROUP_SECONDS
                while any(not store.check([f"{name}/{rank}/read"]) for rank in readers) and time.monotonic() < deadline:
                    self._pause()
            while not store.check([name]):
                if time.monotonic() > deadline + REGROUP_SECONDS:
                    raise RuntimeError(f"rank {decider} does not answer")
                self._pause()
            decision = json.loads(store.get(name))
            with contextlib.suppress(RuntimeError, OSError):  # the decider did not wait any longer
                store.set(f"{name}/{self.rank}/read", "")
            return decision

        return _within(seconds + 2 * REGROUP_SECONDS, ask, self.stop)

    def _pause(self) -> None:
        if self.stop.is_set():
            raise GroupBrokenError("copying was stopped")
        time.sleep(_POLL_SECONDS)


@dataclass(eq=False)
class Group:
    """Nodes that exchange bytes. All nodes must make the same calls in the same order.

    A call raises GroupBrokenError if a node has ended, or is silent for 30 seconds. Then only `leave` may follow.
    """

    gloo: Any
    rank: int
    """The number of this node in `members`."""
    members: tuple[Member, ...]
    stop: Flag

    def __len__(self) -> int:
        return len(self.members)

    def gather(self, mine: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Fills `out`, uint8 (len(self) * n,), with every node's `mine`, uint8 (n,), in the order of `members`."""
        import torch

        self._wait(lambda: self.gloo._allgather_base(torch.from_numpy(out), torch.from_numpy(mine)))

    def exchange(
        self, mine: NDArray[np.uint8], counts: Sequence[int], out: NDArray[np.uint8], out_counts: Sequence[int]
    ) -> None:
        """Sends a part of `mine`, uint8 (n,), to each node, and fills `out`, uint8 (m,), with the parts received.

        In both, the parts are in the order of `members`. Sends `counts[k]` bytes to node k, and receives
        `out_counts[k]` bytes from it.
        """
        import torch

        self._wait(
            lambda: self.gloo.alltoall_base(
                torch.from_numpy(out), torch.from_numpy(mine), list(out_counts), list(counts)
            )
        )

    def _wait(self, start: Callable[[], Any]) -> None:
        try:
            work = start()
            pause = 1e-4
            while not work.is_completed():
                if self.stop.is_set():
                    raise GroupBrokenError("copying was stopped")
                time.sleep(pause)
                pause = min(2 * pause, _POLL_SECONDS)
            work.wait()
        except RuntimeError as error:
            raise GroupBrokenError(_line(error)) from None

    def leave(self) -> None:
        """Ends this node's connections, so that the other nodes get a GroupBrokenError at once."""
        gloo, self.gloo = self.gloo, None
        if hasattr(gloo, "abort"):  # in torch 2.4 this is what freeing it does
            gloo.abort()


def _difference(rank: int, found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """Returns in words the first entry of `found`, of this rank, that is not in `expected`, of rank 0; "" if none."""
    for name, value in found.items():
        if value != expected[name]:
            return f"expected one {name} on all ranks, found {value} on rank {rank}, {expected[name]} on rank 0"
    return ""


def _wait_for_name(host: str, on_message: Callable[[str], object]) -> None:
    """Waits until `host` has an address, as the name of a pod has once it runs. Raises LaunchError if it has none."""
    deadline, told = time.monotonic() + MEET_SECONDS, False
    while True:
        try:
            _within(MEET_SECONDS, partial(socket.getaddrinfo, host, None))
            return
        except (RuntimeError, OSError) as error:
            problem = f"{host}: this name of rank 0 does not resolve ({_line(error)})"
            if time.monotonic() > deadline:
                raise LaunchError(f"{problem}: correct it, or give another address by --rendezvous") from None
        if not told:
            on_message(f"{problem}: waiting up to {MEET_SECONDS:.0f} seconds for it")
        told = True
        time.sleep(_CONNECT_SECONDS)


def _torch() -> Any:
    import torch.distributed

    return torch.distributed


def _store(host: str, port: int, seconds: float, *, hosts: bool = False) -> Any:
    """Returns a store of torch.distributed at this address; with `hosts`, a store that listens there.

    Raises RuntimeError or OSError if it does not answer within `seconds`.
    """
    limit = timedelta(seconds=seconds)
    make = partial(_torch().TCPStore, host, port, is_master=hosts, wait_for_workers=False, timeout=limit)
    return _within(seconds + _CONNECT_SECONDS, make)


def _within(seconds: float, do: Callable[[], T], stop: Flag | None = None) -> T:
    """Returns the result of `do`. Raises RuntimeError if it takes over `seconds`, or once `stop` is set.

    `do` runs in a thread: a call to a store whose process is suspended never returns.
    """
    call, deadline = Call(do), time.monotonic() + seconds
    DaemonThread(call.run, "shardio-meet").begin()
    while not call.is_over:
        if time.monotonic() > deadline or (stop is not None and stop.is_set()):
            raise RuntimeError(f"no answer within {seconds:.0f} seconds")
        time.sleep(_POLL_SECONDS)
    try:
        return call.result()
    finally:
        del call  # or its error, whose traceback has this frame, would be part of a cycle


def _own_address(host: str) -> str:
    """Returns an address of this machine for ranks that can reach `host`. Sends nothing."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
                probe.connect(address)
                found = str(probe.getsockname()[0])
                # A machine may know its own name as a loopback address; the others know it by that name.
                return host if ipaddress.ip_address(found.partition("%")[0]).is_loopback else found
    return socket.gethostname()


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
