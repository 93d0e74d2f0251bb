"""Makes room in a cache, by evicting copies that are not in use, or says what takes it."""

from __future__ import annotations

from collections.abc import Sequence

from shardio.errors import SpaceError
from shardio.sets.cache.folder import Cache, CachedCopy


def make_room(cache: Cache, digest: str, nbytes: int) -> tuple[CachedCopy, ...]:
    """Has room for so many bytes of the copy with this digest. Returns the copies that were evicted for it.

    Raises SpaceError, and evicts nothing, if evicting would not do.
    """
    free = cache.free_nbytes()
    if nbytes <= free:
        return ()
    if nbytes <= free + _nbytes(_evictable(cache, cache.copies())):
        evicted = cache.evict(free=nbytes).removed
        if nbytes <= cache.free_nbytes():
            return evicted
    raise no_room(cache, digest, nbytes)


def no_room(cache: Cache, digest: str, nbytes: int, found: str | None = None) -> SpaceError:
    """Returns the error that says what takes the room. `found` is the filesystem's text, which may know of a quota."""
    copies = [copy for copy in cache.copies() if copy.digest != digest]
    held = "; ".join(map(_describe_use, (copy for copy in copies if copy.in_use))) or "no other copy"
    ours = _nbytes(_evictable(cache, copies))
    others = _nbytes([copy for copy in copies if not copy.in_use]) - ours
    return SpaceError(
        f"{cache.folder}: expected room for {nbytes:,} bytes, found {f'{found}, ' if found else ''}"
        f"{cache.free_nbytes():,} free, {ours:,} in copies that are not in use"
        f"{f', {others:,} in such ones that only other users may remove' if others else ''}; in use: {held}. "
        "Finished files are kept. Make room, choose a larger disk for the cache, or read from the source"
    )


def _evictable(cache: Cache, copies: Sequence[CachedCopy]) -> list[CachedCopy]:
    return [copy for copy in copies if not copy.in_use and cache.may_remove(copy.digest)]


def _nbytes(copies: Sequence[CachedCopy]) -> int:
    return sum(copy.nbytes for copy in copies)


def _describe_use(copy: CachedCopy) -> str:
    by = f" by process {', '.join(map(str, copy.processes))}" if copy.processes else ""
    return f"{copy.digest[:16]} ({copy.source or 'source unknown'}), {copy.nbytes:,} bytes{by}"
