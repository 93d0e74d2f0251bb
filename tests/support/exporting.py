"""A mark for tests of torch.export."""

from __future__ import annotations

import pytest
import torch

needs_export = pytest.mark.skipif(
    torch.__version__.startswith("2.4."), reason="torch 2.4 exports constants as tensors without values"
)
