"""Compiled programs, of which a process can hold only so many."""

from __future__ import annotations

from pathlib import Path

import jax

MAPS = Path("/proc/self/maps")
LIMIT = Path("/proc/sys/vm/max_map_count")
FULL = 0.3
"""The share of the memory maps that may be in use before compiled programs are forgotten."""


def make_room(share: float = FULL) -> bool:
    """Forget all compiled programs if they take up more than a share of the memory maps that Linux allows a process.

    Each program takes some hundred of them, and when there are none left, the compiler crashes: after about a hundred
    models of different shapes. Whatever is needed again is compiled again.
    """
    try:
        used, allowed = MAPS.read_bytes().count(b"\n"), int(LIMIT.read_text())
    except (OSError, ValueError):  # not Linux, or not readable
        return False
    if used <= share * allowed:
        return False
    jax.clear_caches()
    return True
