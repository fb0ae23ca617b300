"""Shorten gradients that are much longer than usual."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

MEMORY = 0.98
"""Of the mean square of the norms: about fifty steps."""


class SurgeState(NamedTuple):
    """The mean square of recent norms, after clipping; 0 before the first step."""

    mean_square: Float[Array, ""]


def clip_surges(factor: float) -> optax.GradientTransformation:
    """An Optax transformation: no gradient is longer than ``factor`` times the root mean square of those before it.

    Adam takes a single long gradient into its mean at once and into its scale slowly, so that its next steps are long.
    The bound moves with the gradients, by up to ``factor`` in a few dozen steps, so that it needs no units.
    """

    def init(params: Any) -> SurgeState:
        del params
        return SurgeState(jnp.zeros((), jnp.float32))

    def update(updates: Any, state: SurgeState, params: Any = None) -> tuple[Any, SurgeState]:
        del params
        norm = optax.tree.norm(updates).astype(jnp.float32)
        usual = state.mean_square
        is_first = usual == 0.0
        shrink = jnp.where(is_first, 1.0, jnp.minimum(1.0, factor * jnp.sqrt(usual) / jnp.maximum(norm, 1e-30)))
        square = (shrink * norm) ** 2
        after = jnp.where(is_first, square, MEMORY * usual + (1.0 - MEMORY) * square)
        return jax.tree.map(lambda g: g * shrink.astype(g.dtype), updates), SurgeState(after)

    return optax.GradientTransformation(init, update)
