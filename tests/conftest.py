"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

MAPPED = 20_000
"""Memory maps of the process. Each compiled program adds some, and Linux allows a process 65,530: then compiling
crashes."""


@pytest.fixture(autouse=True)
def _drop_compiled_programs() -> Iterator[None]:
    """Forget compiled programs when there are too many of them."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAPPED:
        jax.clear_caches()
