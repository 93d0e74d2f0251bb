"""Paths of the checkout's files, and of those that may lie beside it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
IMAGENET = ROOT / "examples" / "imagenet"
CHAOS = ROOT / "tools" / "chaos"
DATA = ROOT / "tests" / "data"
SUPPORT = ROOT / "tests" / "support"
SHARED = ROOT.parent / "shared"
"""Real and damaged images, where they are at hand; tests that use them have others of their own making beside them."""
