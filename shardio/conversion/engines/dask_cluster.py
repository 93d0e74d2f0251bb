"""Runs shard tasks on a Dask cluster. If a worker is lost, dask.distributed runs its task again on another worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from shardio.conversion.engines.pool import RESUME, Pool, Terms
from shardio.conversion.records import ShardRecord
from shardio.errors import ConvertError

if TYPE_CHECKING:
    from distributed import Client

# The scheduler keeps what waits in its memory, a megabyte or more for each task: enough that no worker waits, and that
# a cluster which grows with its work grows.
_TASKS_PER_THREAD = 2
_FEWEST_TASKS = 64
# For errors of one machine, say of its mount of the filesystem. Lost workers do not count.
_RETRIES = 2
_NAMED_WORKERS = 3


def connect(address: str) -> Client:
    """Returns a client of the scheduler at `address`.

    Raises ValueError if `address` is invalid, ConvertError if dask.distributed is missing or no scheduler answers.
    """
    try:
        from distributed import Client
        from distributed.comm.addressing import resolve_address
    except ImportError:
        raise ConvertError(
            "a conversion on a Dask cluster needs dask.distributed: pip install 'shardio[dask]'"
        ) from None
    try:
        resolve_address(address)  # a client that was given nonsense complains, and hangs, when it is finalized
        return Client(address, name="shardio", set_as_default=False)
    except ValueError as error:
        raise ValueError(f"scheduler must be an address such as tcp://host:8786; found {address!r}: {error}") from None
    except OSError as error:
        raise ConvertError(f"{address}: expected a Dask scheduler, found none: {error}") from None


@contextlib.contextmanager
def open_cluster(address: str) -> Iterator[Pool]:
    """Yields a pool of the workers of the scheduler at `address`. Workers may come and go; without any, tasks wait."""
    client = connect(address)
    import dask.config
    from distributed.comm.core import CommClosedError

    # A shard of small images has many sources, and they have to travel: nothing to be warned of.
    with client, dask.config.set({"distributed.admin.large-graph-warning-threshold": "1TB"}):
        try:
            yield _Cluster(client)
        except CommClosedError as error:
            raise ConvertError(f"{address}: the scheduler is gone: {error}. {RESUME}") from None


class _Cluster(Pool):
    def __init__(self, client: Client) -> None:
        self._client = client

    def check(self, terms: Terms) -> None:
        answers = self._client.run(terms.check, on_error="return")
        found = [f"{worker}: {answer}" for worker, answer in answers.items() if answer is not None]
        if found:
            more = f"; and {len(found) - _NAMED_WORKERS:,} more" if len(found) > _NAMED_WORKERS else ""
            named = "; ".join(found[:_NAMED_WORKERS])
            raise ConvertError(f"{len(found):,} of {len(answers):,} workers cannot take part: {named}{more}")

    def most_in_flight(self) -> int:
        threads: int = sum(self._client.nthreads().values())
        return max(_FEWEST_TASKS, _TASKS_PER_THREAD * threads)

    def submit(self, call: Callable[..., ShardRecord], *arguments: object) -> Future[ShardRecord]:
        # Not by `client.get_executor()`: its futures never end if the scheduler goes away while it sends a result.
        # The result is no Future of the standard library, but has all that is asked of one.
        return self._client.submit(call, *arguments, pure=False, retries=_RETRIES)  # type: ignore[return-value]

    def cancel(self, futures: Iterable[Future[ShardRecord]]) -> None:
        self._client.cancel(list(futures))
