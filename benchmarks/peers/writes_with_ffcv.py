"""FFCV's writer of raw pixels."""

from images_with_ffcv import PACKAGES, write

__all__ = ["PACKAGES", "WAYS"]
WAYS = {"FFCV's DatasetWriter, raw": write}
