"""The few exceptions of shardio. Each is also a builtin, so that code that knows nothing of shardio can catch it.

A caller's own mistakes (a wrong type, an index out of range) raise plain builtins. A ShardioError speaks of files:
it names the file, what was expected, what was found, and the way out.
"""

from typing import Literal

Reason = Literal["damaged", "empty", "incomplete", "too large", "unreadable", "unsupported"]
"""Why an image is refused, as rejects.jsonl tells it; docs/format.md says what each means."""


class ShardioError(Exception):
    """Base of every error that shardio raises about the world outside the program."""


class FormatError(ShardioError, ValueError):
    """A file of a shard set is not what docs/format.md says it must be."""


class SetNotFoundError(ShardioError, FileNotFoundError):
    """There is no published shard set (no manifest.json), or not the split that was asked for."""


class SourceError(ShardioError, ValueError):
    """The image collection is not laid out as a converter can read it."""


class DecodeError(ShardioError, ValueError):
    """One image was refused. `reason` is the class of causes, the message is the detail."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class ConvertError(ShardioError, RuntimeError):
    """A conversion cannot go on, or nothing may be published. What is done is kept."""


class SpaceError(ShardioError, OSError):
    """The filesystem has too little room for what is to be written, or the memory for what is to be read into it."""


class CacheError(ShardioError, ValueError):
    """A folder cannot be used as a cache of shard sets: it holds something else, or is not on this machine."""


class LaunchError(ShardioError, ValueError):
    """The launcher's variables do not give one rank of one world."""
