"""shardio's converter: checksums, mean and deviation included; the set is durable when it returns."""

from images_with_shardio import PACKAGES, write

__all__ = ["PACKAGES", "WAYS"]
WAYS = {"shardio convert": write}
