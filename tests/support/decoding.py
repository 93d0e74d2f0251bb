"""Decoding that keeps a refusal."""

from __future__ import annotations

from shardio.conversion.images.decode import Decoded, decode_image
from shardio.errors import DecodeError


def decode_or_refuse(data: bytes) -> Decoded | DecodeError:
    try:
        return decode_image(data)
    except DecodeError as error:
        return error
