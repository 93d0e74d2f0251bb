"""shardio: ImageNet-like image sets as memory-mapped uint8 shards, fed to training at the speed of memory.

Names are imported from their modules when they are first used: reading a set needs only numpy, training also needs
torch, and only converting imports the image decoders.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardio.version import __version__ as __version__

if TYPE_CHECKING:
    from shardio.cache.folder import Cache as Cache
    from shardio.cache.stage import StageReport as StageReport
    from shardio.cache.stage import stage as stage
    from shardio.changes.carry import ChangeReport as ChangeReport
    from shardio.changes.change import change as change
    from shardio.changes.merge import merge as merge
    from shardio.conversion.convert import convert as convert
    from shardio.conversion.report import ConvertReport as ConvertReport
    from shardio.conversion.sources.table import Table as Table
    from shardio.conversion.writing.set_writer import ShardWriter as ShardWriter
    from shardio.errors import CacheError as CacheError
    from shardio.errors import ConvertError as ConvertError
    from shardio.errors import DecodeError as DecodeError
    from shardio.errors import FormatError as FormatError
    from shardio.errors import LaunchError as LaunchError
    from shardio.errors import SetNotFoundError as SetNotFoundError
    from shardio.errors import ShardioError as ShardioError
    from shardio.errors import SourceError as SourceError
    from shardio.errors import SpaceError as SpaceError
    from shardio.loading.dataset import ShardDataset as ShardDataset
    from shardio.loading.loader import ShardLoader as ShardLoader
    from shardio.loading.mixture import Mixture as Mixture
    from shardio.loading.mixture import Part as Part
    from shardio.order.orders import BlockShuffle as BlockShuffle
    from shardio.reading.sample import Sample as Sample
    from shardio.reading.shardset import ShardSet as ShardSet
    from shardio.reading.shardset import open_shards as open_shards
    from shardio.sets.publish import publish as publish
    from shardio.sets.selection import Selection as Selection
    from shardio.sets.verify import verify as verify

_HOMES = {
    "shardio.cache.folder": ("Cache",),
    "shardio.conversion.convert": ("convert",),
    "shardio.conversion.report": ("ConvertReport",),
    "shardio.conversion.sources.table": ("Table",),
    "shardio.loading.dataset": ("ShardDataset",),
    "shardio.errors": (
        "CacheError",
        "ConvertError",
        "DecodeError",
        "FormatError",
        "LaunchError",
        "SetNotFoundError",
        "ShardioError",
        "SourceError",
        "SpaceError",
    ),
    "shardio.loading.loader": ("ShardLoader",),
    "shardio.loading.mixture": ("Mixture", "Part"),
    "shardio.changes.change": ("change",),
    "shardio.order.orders": ("BlockShuffle",),
    "shardio.changes.carry": ("ChangeReport",),
    "shardio.changes.merge": ("merge",),
    "shardio.sets.publish": ("publish",),
    "shardio.sets.selection": ("Selection",),
    "shardio.conversion.writing.set_writer": ("ShardWriter",),
    "shardio.reading.sample": ("Sample",),
    "shardio.reading.shardset": ("ShardSet", "open_shards"),
    "shardio.cache.stage": ("StageReport", "stage"),
    "shardio.sets.verify": ("verify",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'shardio' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
