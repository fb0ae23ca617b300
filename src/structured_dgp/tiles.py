"""Sums over tiles of rows whose gradient is finished tile by tile.

On a CPU, the intermediates of a whole minibatch fall out of the cache between forward and backward pass. Here the
gradient of each tile is computed right after its value and accumulated, nothing is recomputed, and memory is bounded
by one tile, however large the batch and the number of samples are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

TILE_ROWS = 640
"""Rows (points times samples) that one tile should have."""


def split_rows(n_rows: int, n_samples: int, tile_rows: int = TILE_ROWS) -> tuple[int, int]:
    """How many tiles, and how many rows in each, for ``n_rows`` points with ``n_samples`` samples each."""
    tiles = max(1, round(n_rows * n_samples / tile_rows))
    tiles = min(tiles, n_rows)
    return tiles, -(-n_rows // tiles)


def to_tiles(a: Float[Array, "n ..."], tiles: int, rows: int) -> Float[Array, "tiles rows ..."]:
    """The rows of ``a`` in tiles, the last one filled up with copies of the first row."""
    missing = tiles * rows - a.shape[0]
    filled = jnp.concatenate([a, jnp.broadcast_to(a[:1], (missing, *a.shape[1:]))]) if missing else a
    return filled.reshape(tiles, rows, *a.shape[1:])


def tile_sum(function: Callable[[Any, Any], Float[Array, ""]], shared: Any, tiles: Any) -> Float[Array, ""]:
    """Σ_t function(shared, tiles[t]) over the leading axis of ``tiles``."""
    n_tiles = jax.tree.leaves(tiles)[0].shape[0]
    if n_tiles == 1:
        return function(shared, jax.tree.map(lambda a: a[0], tiles))
    arrays, rest = eqx.partition(shared, eqx.is_inexact_array)

    def value(arrays: Any, tile: Any) -> Float[Array, ""]:
        return function(eqx.combine(arrays, rest), tile)

    @jax.custom_vjp
    def total(arrays: Any, tiles: Any) -> Float[Array, ""]:
        return jnp.sum(jax.lax.map(lambda tile: value(arrays, tile), tiles))

    def forward(arrays: Any, tiles: Any) -> tuple[Float[Array, ""], tuple[Any, Any]]:
        def step(carry: tuple[Array, Any], tile: Any) -> tuple[tuple[Array, Any], Any]:
            summed, gradient = carry
            term, (term_gradient, tile_gradient) = jax.value_and_grad(value, argnums=(0, 1))(arrays, tile)
            return (summed + term, jax.tree.map(jnp.add, gradient, term_gradient)), tile_gradient

        dtype = jax.tree.leaves(arrays)[0].dtype
        start = (jnp.zeros((), dtype), jax.tree.map(jnp.zeros_like, arrays))
        (summed, gradient), tile_gradients = jax.lax.scan(step, start, tiles)
        return summed, (gradient, tile_gradients)

    def backward(gradients: tuple[Any, Any], g: Float[Array, ""]) -> tuple[Any, Any]:
        return jax.tree.map(lambda a: g * a, gradients)

    total.defvjp(forward, backward)
    return total(arrays, tiles)
