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
    "BlockShuffle": "shardio.order.orders",
    "Cache": "shardio.cache.folder",
    "CacheError": "shardio.errors",
    "ChangeReport": "shardio.changes.carry",
    "ConvertError": "shardio.errors",
    "ConvertReport": "shardio.conversion.report",
    "DecodeError": "shardio.errors",
    "FormatError": "shardio.errors",
    "LaunchError": "shardio.errors",
    "Mixture": "shardio.loading.mixture",
    "Part": "shardio.loading.mixture",
    "Sample": "shardio.reading.sample",
    "Selection": "shardio.sets.selection",
    "SetNotFoundError": "shardio.errors",
    "ShardDataset": "shardio.loading.dataset",
    "ShardLoader": "shardio.loading.loader",
    "ShardSet": "shardio.reading.shardset",
    "ShardWriter": "shardio.conversion.writing.set_writer",
    "ShardioError": "shardio.errors",
    "SourceError": "shardio.errors",
    "SpaceError": "shardio.errors",
    "StageReport": "shardio.cache.stage",
    "Table": "shardio.conversion.sources.table",
    "change": "shardio.changes.change",
    "convert": "shardio.conversion.convert",
    "merge": "shardio.changes.merge",
    "open_shards": "shardio.reading.shardset",
    "publish": "shardio.sets.publish",
    "stage": "shardio.cache.stage",
    "verify": "shardio.sets.verify",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardio' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ImportError as error:
        if error.name != "shardio.kernels":
            raise
        raise ImportError(
            f"{error.path}: the kernels in C are not built here. If shardio is installed, run Python outside of the "
            "source folder; or build the kernels by `pip install -e .`"
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
