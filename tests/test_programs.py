"""Compiled programs are forgotten before there are too many of them."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from structured_dgp import programs


def mapped() -> int:
    return Path("/proc/self/maps").read_bytes().count(b"\n")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="memory maps can only be counted on Linux")
def test_room_is_made_only_when_it_is_needed_and_programs_still_run() -> None:
    program = jax.jit(lambda x: jnp.sum(jnp.sin(x) @ jnp.cos(x)))
    x = jnp.ones((64, 64))
    before = program(x)
    assert not programs.make_room(1.0)
    assert program._cache_size() == 1
    assert programs.make_room(0.0)
    assert program._cache_size() == 0
    assert program(x) == before


def test_a_system_without_memory_maps_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(programs, "MAPS", tmp_path / "missing")
    assert not programs.make_room(0.0)
