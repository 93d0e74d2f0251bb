"""Lets the nodes of a job meet, agree on a set, and form groups that exchange bytes, also after some nodes have ended.

The ranks meet at a store of torch.distributed, a server of keys and values, where rank 0 decides. One rank of each node
then joins a group of gloo, which moves bytes. A group cannot shrink. When a node ends, the other nodes get an error and
form a new group, at a store that one of them has hosted since the beginning: the first in rank order that answers. That
node decides which nodes are in the new group.

Nodes listen on the interface by which they reach rank 0, and nowhere else. A node that gets a malformed answer, or
none, copies alone: a stranger can keep nodes from copying together, but do no other harm.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardio.errors import LaunchError, printable, shortened
from shardio.system.machine import own_address, public_name
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


@dataclass(frozen=True)
class Member:
    """A node of a group: its rank, its hostname, the address of the store that it hosts, and the set that it copies."""

    rank: int
    name: str
    host: str
    port: int
    digest: str

    def __post_init__(self) -> None:  # who is no node may say anything
        is_node = type(self.rank) is type(self.port) is int and 0 < self.port < 1 << 16
        if not (is_node and self.name.isascii() and self.host.isascii()):
            raise ValueError("expected a node: integers for rank and port, and ASCII text for name and host")

    def __str__(self) -> str:
        return shortened(f"{self.name} (rank {self.rank})")


class Meeting:
    """The ranks of a job, which meet at `store`, a store of torch.distributed that rank 0 keeps on the machine `host`.

    All ranks must make the same calls in the same order. One thread at a time may use a Meeting.
    """

    def __init__(self, store: Any, rank: int, world_size: int, host: str) -> None:
        self.rank = rank
        self._store = store
        self._ranks = list(range(world_size))
        self._host = own_address(public_name(host, *_interfaces()[:1]))
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
        host = public_name(host, *_interfaces()[:1])
        # torchrun listens at MASTER_PORT by itself.
        hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        for attempt in reversed(range(_ATTEMPTS)):  # one whose connection is cut may wait until its time is over
            try:
                store = _store(own_address(host) if hosts else host, port, MEET_SECONDS / _ATTEMPTS, hosts=hosts)
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

    def agree(self, what: Mapping[str, str]) -> None:
        """Raises LaunchError, at all ranks, unless all call this within 120 seconds with the same `what`, such as
        {"split": "val"}."""

        def parse(value: Any) -> dict[str, str]:
            return {name: text + "" for name, text in value.items()}

        def decide(found: dict[int, dict[str, str]]) -> dict[int, dict[str, str]]:
            others = [rank for rank in self._ranks if rank and found.get(rank, {}) != what]
            return {0: dict(what)} | {rank: found.get(rank, {}) for rank in others[:1]}

        try:
            found = self._decide(self._store, 0, "agree", MEET_SECONDS, dict(what), parse, decide)
            # A rank of another job may come to the same port after the ranks of this job have agreed.
            found[self.rank] = dict(what)
            problem = next(filter(None, (_difference(rank, found[rank], found.get(0, {})) for rank in found)), "")
        except (RuntimeError, OSError) as error:
            problem = f"rank 0 does not answer: {_line(error)}"
        if problem:
            raise LaunchError(
                f"{shortened(problem, 600)}: all ranks must copy the same set together, and make their loaders in the "
                "same order; two jobs need two addresses, which --rendezvous gives"
            )

    def form(self, digest: str, *, fills: bool) -> tuple[Member, ...]:
        """Returns the members that fill copies of the set `digest`, in rank order; () if this rank does not fill.

        `fills` says that this rank fills its node's copy; at most one rank of a node does. Leaves out ranks that do not
        call this within 120 seconds, or whose digest is not rank 0's. Without `fills`, only rank 0 waits for others.
        Raises GroupBrokenError if rank 0 does not answer, or if this rank fills and is left out.
        """

        def decide(found: dict[int, Member]) -> dict[int, Member]:
            return {rank: found[rank] for rank in sorted(found) if found[rank].digest == digest}

        mine = None
        try:
            if fills:
                self._own = _store(self._host, 0, SILENT_SECONDS, hosts=True)
                mine = Member(self.rank, ascii(socket.gethostname())[1:-1], self._host, self._own.port, digest)
            elif self.rank:
                self._store.set(f"form/{self.rank}", json.dumps(None))
                return ()
            found = self._decide(self._store, 0, "form", MEET_SECONDS, mine, lambda value: Member(**value), decide)
        except (RuntimeError, OSError) as error:
            raise GroupBrokenError(f"rank 0 does not answer: {_line(error)}") from None
        if mine and found.get(self.rank) != mine:
            raise GroupBrokenError(f"rank {self.rank} came late, copies another set, or another process has this rank")
        return tuple(found.values()) if mine else ()

    def regroup(self, members: Sequence[Member]) -> tuple[Member, ...]:
        """Returns the `members` of a broken group that call this within 10 seconds; () if this node is left alone."""
        self._ranks = [member.rank for member in members]
        self._generation += 1
        for host in members[:_MOST_HOSTS]:
            try:
                store = self._store_of(host, _CONNECT_SECONDS)
                found = self._decide(store, host.rank, f"regroup{self._generation}", REGROUP_SECONDS, True, bool)
            except (RuntimeError, OSError):
                continue  # it has ended, too
            return tuple(member for member in members if member.rank in found) if self.rank in found else ()
        return ()

    def connect(self, members: Sequence[Member]) -> Group:
        """Connects `members`, who all call this, into a group. Raises GroupBrokenError if that fails."""
        number, torch = members.index(next(m for m in members if m.rank == self.rank)), _torch()
        try:
            store = torch.PrefixStore(f"gloo{self._generation}/", self._store_of(members[0], SILENT_SECONDS))
            options, device = torch.ProcessGroupGloo._Options(), torch.ProcessGroupGloo.create_device
            options._timeout = timedelta(seconds=SILENT_SECONDS)
            options._devices = [device(interface=name) for name in _interfaces()] or [device(hostname=self._host)]
            make = partial(torch.ProcessGroupGloo, store, number, len(members), options)
            return Group(_within(2 * SILENT_SECONDS, make, self.stop), number, tuple(members), self.stop)
        except (RuntimeError, OSError) as error:
            raise GroupBrokenError(_line(error)) from None

    def _store_of(self, host: Member, seconds: float) -> Any:
        return self._own if host.rank == self.rank else _store(host.host, host.port, seconds)

    def _decide(
        self,
        store: Any,
        decider: int,
        name: str,
        seconds: float,
        mine: Any,
        parse: Callable[[Any], T],
        decide: Callable[[dict[int, T]], dict[int, T]] = dict,
    ) -> dict[int, T]:
        """Returns the result of `decide`, which rank `decider` calls with {rank: that rank's `mine`}.

        The dict lacks ranks that do not send their value, as JSON, within `seconds`. `parse` turns JSON into a value,
        and raises an error if no rank can have sent it. `name` is the key of this decision in `store`. The decider
        returns after the other ranks have read the result, or 10 seconds later. Raises RuntimeError if the store or the
        decider does not answer.
        """

        def ask() -> dict[int, T]:
            store.set(f"{name}/{self.rank}", json.dumps(mine, default=vars))
            if self.rank == decider:
                keys = {rank: f"{name}/{rank}" for rank in self._ranks}
                self._wait_for(store, [*keys.values()], seconds)
                values = {rank: _parsed(store.get(key), parse) for rank, key in keys.items() if store.check([key])}
                found = {rank: value for rank, value in values.items() if value is not None}
                decided = decide(found)
                store.set(name, json.dumps(decided, default=vars))
                # The store may end with this process, so the others read the decision first.
                self._wait_for(store, [f"{name}/{rank}/read" for rank in found if rank != decider], REGROUP_SECONDS)
                return decided
            if not self._wait_for(store, [name], seconds + REGROUP_SECONDS):
                raise RuntimeError(f"rank {decider} does not answer")
            decision = _parsed(store.get(name), lambda ranks: {int(rank): parse(each) for rank, each in ranks.items()})
            with contextlib.suppress(RuntimeError, OSError):  # the decider did not wait any longer
                store.set(f"{name}/{self.rank}/read", "")
            if decision is None:
                raise RuntimeError("found a malformed decision of the rank that decides")
            return decision

        return _within(seconds + 2 * REGROUP_SECONDS, ask, self.stop)

    def _wait_for(self, store: Any, keys: list[str], seconds: float) -> bool:
        """Waits until `store` has all `keys`. Returns False if it lacks one of them after `seconds`."""
        deadline = time.monotonic() + seconds
        while keys and not store.check(keys):
            if time.monotonic() > deadline:
                return False
            if self.stop.is_set():
                raise GroupBrokenError("copying was stopped")
            time.sleep(_POLL_SECONDS)
        return True


@dataclass(eq=False)
class Group:
    """Nodes that exchange bytes. All nodes must make the same calls in the same order.

    A call raises GroupBrokenError if a node has ended, or is silent for 30 seconds. Then only `leave` may follow.
    """

    gloo: Any
    rank: int
    """The position of this node in `members`, not its rank in the job."""
    members: tuple[Member, ...]
    stop: Flag

    def __len__(self) -> int:
        return len(self.members)

    def gather(self, mine: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Fills `out`, uint8 (len(self) * n,), with every node's `mine`, uint8 (n,), in the order of `members`."""
        self._wait(lambda tensor: self.gloo._allgather_base(tensor(out), tensor(mine)))

    def exchange(
        self, mine: NDArray[np.uint8], counts: list[int], out: NDArray[np.uint8], out_counts: list[int]
    ) -> None:
        """Sends a part of `mine`, uint8 (n,), to each node, and fills `out`, uint8 (m,), with the parts received.

        In both, the parts are in the order of `members`. Sends `counts[k]` bytes to node k, and receives
        `out_counts[k]` bytes from it.
        """
        self._wait(lambda tensor: self.gloo.alltoall_base(tensor(out), tensor(mine), out_counts, counts))

    def scatter(self, mine: NDArray[np.uint8], sender: int, out: NDArray[np.uint8]) -> None:
        """Fills `out` with the `mine` of node `sender`, which sends it to each node itself. Both are uint8 (n,)."""
        options = _torch().ScatterOptions()
        options.rootRank = sender
        mines = [mine] if self.rank == sender else []
        self._wait(lambda tensor: self.gloo.scatter([tensor(out)], [[tensor(m)] * len(self) for m in mines], options))

    def _wait(self, start: Callable[[Callable[[NDArray[np.uint8]], Any]], Any]) -> None:
        import torch

        try:
            work = start(torch.from_numpy)
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
    """Returns a text about the first value of `found`, of rank `rank`, that is not as `expected`, of rank 0; or ""."""
    if not found and rank:
        return f"rank {rank} has not come within {MEET_SECONDS:.0f} seconds"
    for name in {**found, **expected}:
        value, wanted = found.get(name, "nothing"), expected.get(name, "nothing")
        if value != wanted:
            return f"expected one {name} on all ranks, found {value} on rank {rank}, {wanted} on rank 0"
    return ""


def _parsed(text: bytes, parse: Callable[[Any], T]) -> T | None:
    """Returns parse(JSON value in `text`); None if no rank can have sent it. Anybody may write into the store."""
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
        return parse(json.loads(text))
    return None


def _wait_for_name(host: str, on_message: Callable[[str], object]) -> None:
    """Waits up to 120 seconds until `host` has an address, as the name of a pod has once the pod runs. Calls
    `on_message` once if it must wait. Raises LaunchError if `host` still has no address then."""
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
    """Returns a store of torch.distributed at this address; with `hosts`, a store that listens there, and only there.

    Raises RuntimeError or OSError if it does not answer within `seconds`.
    """
    limit, server = timedelta(seconds=seconds), None
    if hosts:  # torch itself would listen on all interfaces
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port, server = listener.getsockname()[1], listener.detach()
    make = partial(_torch().TCPStore, host, port, is_master=hosts, wait_for_workers=False, timeout=limit)
    try:
        return _within(seconds + _CONNECT_SECONDS, partial(make, master_listen_fd=server))
    except NotImplementedError:  # before torch 2.8, only the other kind of server takes a socket
        return _within(seconds + _CONNECT_SECONDS, partial(make, master_listen_fd=server, use_libuv=False))


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


def _interfaces() -> list[str]:
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def _line(error: Exception) -> str:
    return printable((str(error).strip().splitlines() or [type(error).__name__])[0][:200])
