"""A deep GP whose posterior is a set of draws of the inducing outputs."""

from __future__ import annotations

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from structured_dgp.couplings import MeanField, Structure, Widths
from structured_dgp.likelihoods import Likelihood
from structured_dgp.model import DRAWS, DeepGP, moments_by_rows, moments_in_tiles
from structured_dgp.noise import low_discrepancy_noise
from structured_dgp.precision import Precision, wide_scope
from structured_dgp.prediction import Mixture
from structured_dgp.propagation import Layer, functions_given, propagate_given, whiteners
from structured_dgp.validation import as_matrix


class SampledDeepGP(eqx.Module):
    """Layers, a likelihood, and draws of the whitened inducing outputs that stand for their posterior.

    Attributes:
        draws: (S, T, M), equally likely.
    """

    layers: tuple[Layer, ...]
    draws: Float[Array, "S T M"]
    likelihood: Likelihood
    widths: Widths = eqx.field(static=True)
    jitter: float = eqx.field(static=True)
    precision: Precision = eqx.field(static=True)

    @classmethod
    def of(cls, model: DeepGP, draws: Float[Array, "S T M"]) -> SampledDeepGP:
        """The layers and the likelihood of ``model`` with draws instead of its posterior."""
        return cls(model.layers, draws, model.likelihood, model.widths, model.jitter, model.precision)

    @property
    def structure(self) -> Structure:
        """Given their inducing outputs, the GPs are independent."""
        return MeanField().structure(self.widths)

    @property
    def n_hidden(self) -> int:
        return sum(self.widths[:-1])

    @property
    def dtype(self) -> Any:
        return self.draws.dtype

    @wide_scope
    def predict(self, x: Any, n_draws: int = DRAWS, seed: int = 0) -> Mixture:
        """The distribution of y at new inputs: a mixture over the posterior draws and, for each, draws of hidden noise.

        It has at least ``n_draws`` components, the same number for each posterior draw.
        """
        x = as_matrix(x, "x", self.layers[0].inducing.shape[1])
        repeats = math.ceil(n_draws / len(self.draws)) if self.n_hidden else 1
        # Neighbours of a Sobol' set fill the space, every S-th of its points does not: a draw has neighbours.
        v = jnp.repeat(self.draws, repeats, axis=0)
        eps = jnp.asarray(low_discrepancy_noise(len(v), self.n_hidden, seed), self.dtype)
        mean, cov = moments_by_rows(lambda rows: _predict(self, jnp.asarray(rows, self.dtype), v, eps), x)
        return self.likelihood.predictive(mean, cov)

    @wide_scope
    def sample_functions(self, x: Any, key: PRNGKeyArray, n_samples: int = 1) -> list[Float[Array, "S n _"]]:
        """Joint draws of every layer's output at all rows of ``x``, as :meth:`DeepGP.sample_functions`."""
        x = jnp.asarray(as_matrix(x, "x", self.layers[0].inducing.shape[1]), self.dtype)
        return _sample_functions(self, x, key, n_samples)


@eqx.filter_jit
def _predict(
    model: SampledDeepGP, x: Float[Array, "n D"], v: Float[Array, "K T M"], eps: Float[Array, "K T_hidden"]
) -> tuple[Float[Array, "K n P"], Float[Array, "K n P P"]]:
    whitening = whiteners(model.layers, model.jitter, model.precision)

    def one(tile: Float[Array, "rows D"]) -> tuple[Array, Array]:
        noise = jnp.broadcast_to(eps[:, None], (len(v), len(tile), eps.shape[1]))
        out = propagate_given(model.layers, whitening, model.structure, tile, v, noise)
        return jnp.swapaxes(out.mean, 0, 1), jnp.swapaxes(out.cov, 0, 1)

    return moments_in_tiles(one, x, len(v))


@eqx.filter_jit
def _sample_functions(
    model: SampledDeepGP, x: Float[Array, "n D"], key: PRNGKeyArray, n_samples: int
) -> list[Float[Array, "S n _"]]:
    draw_key, layers_key = jax.random.split(key)
    v = model.draws[jax.random.randint(draw_key, (n_samples,), 0, len(model.draws))]
    whitening = whiteners(model.layers, model.jitter, model.precision)
    return functions_given(model.layers, whitening, model.structure, x, v, layers_key, model.jitter)
