"""Runs the steps of a batch, natively where that can be done."""

from shardio.augment.pixels_torch import run_steps as run_steps
