"""Theorem 1, KL and ELBO against the dense NumPy reference, for every coupling, with the same noise."""

from __future__ import annotations

import itertools
from unittest import mock

import dense
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array

from structured_dgp import RBF, Chain, DeepGP, DensePosterior, Gaussian, Layer, Posterior, linalg, propagation
from structured_dgp.couplings import Arrow, Coupling, FullyCoupled, MeanField, Order, Stripes, StripesAndArrow
from structured_dgp.posterior import AbstractPosterior
from structured_dgp.precision import as_array

COUPLINGS: dict[str, Coupling] = {
    "mf": MeanField(),
    "stripes": Stripes(),
    "arrow": Arrow(),
    "star": StripesAndArrow(),
    "fc": FullyCoupled(),
}
WIDTHS = [(1,), (3,), (2, 1), (1, 3), (2, 3, 2), (3, 1, 1), (2, 2, 2, 1), (2, 3, 1, 2, 3), (2, 2, 2, 2, 1)]
N_INPUTS, M, N_POINTS, N_SAMPLES = 3, 3, 4, 2


def build(reference: dense.DenseDGP, posterior: AbstractPosterior) -> DeepGP:
    layers = [Layer(kernel=RBF(p.lengthscale, p.variance), inducing=p.Z, mean=p.W) for p in reference.layers]
    return DeepGP(layers, posterior, Gaussian(reference.noise), jitter=reference.jitter)


def chain_rule(factor: np.ndarray, widths: tuple[int, ...], mean: np.ndarray) -> Chain:
    """The chain whose dense factor is given: W_l = C[l, l-1] C[l-1, l-1]⁻¹."""
    ends = np.cumsum([0, *widths]) * mean.shape[1]
    spans = [slice(a, b) for a, b in itertools.pairwise(ends)]
    return Chain(
        mean=as_array(mean),
        factors=tuple(as_array(factor[span, span]) for span in spans),
        weights=tuple(
            as_array(factor[upper, lower] @ np.linalg.inv(factor[lower, lower]))
            for lower, upper in itertools.pairwise(spans)
        ),
    )


def model_and_reference(kind: str, widths: tuple[int, ...], seed: int) -> tuple[DeepGP, dense.DenseDGP]:
    rng = np.random.default_rng(seed)
    has_mean = rng.random(len(widths)) < 0.7
    noise = rng.uniform(0.05, 0.5, widths[-1])
    pattern = (
        dense.random_order(rng, widths) if kind == "order" else dense.patterns.get(kind, dense.fully_coupled)(widths)
    )
    reference = dense.random_dgp(rng, N_INPUTS, widths, M, pattern, noise=noise, has_mean=has_mean)
    if kind == "chain":
        factor = dense.chain_factor(rng, widths, M)
        reference = dense.DenseDGP(reference.layers, reference.mean, factor, reference.noise, reference.jitter)
        rule = chain_rule(factor, widths, reference.mean)
        return build(reference, DensePosterior(rule, widths)), reference
    coupling = Order(pattern) if kind == "order" else COUPLINGS[kind]
    return build(reference, Posterior.from_dense(coupling, widths, reference.mean, reference.factor)), reference


def compiled_whitener(K: Array, jitter: float) -> Array:
    with jax.disable_jit(False):
        return linalg.whitener(K, jitter)


def compare(model: DeepGP, reference: dense.DenseDGP, seed: int) -> None:
    rng = np.random.default_rng(seed)
    widths = reference.widths
    x = rng.standard_normal((N_POINTS, N_INPUTS))
    y = rng.standard_normal((N_POINTS, widths[-1]))
    eps = rng.standard_normal((N_SAMPLES, N_POINTS, sum(widths[:-1])))
    expected = dense.propagate(reference, x, eps)
    out = model.propagate(x, eps)
    assert len(out.hidden) == len(expected.hidden) == len(widths) - 1
    for ours, theirs in zip(out.hidden, expected.hidden, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(out.mean, expected.mean, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(out.cov, expected.cov, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(model.kl(), dense.kl(reference), rtol=1e-8, atol=1e-8)
    elbo = model.elbo(x, y, eps=eps, n_data=50)
    np.testing.assert_allclose(elbo, dense.elbo(reference, x, y, eps, 50), rtol=1e-8, atol=1e-8)


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from([*COUPLINGS, "order", "order", "chain"]),
    widths=st.sampled_from(WIDTHS),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_dense_reference(kind: str, widths: tuple[int, ...], seed: int) -> None:
    # Uncompiled, because every example has other shapes; but for the factorisation, whose loops would be slow.
    with mock.patch.object(propagation, "whitener", compiled_whitener), jax.disable_jit():
        compare(*model_and_reference(kind, widths, seed), seed + 1)


@pytest.mark.parametrize(
    ("kind", "widths"),
    [
        ("mf", (2, 2, 1)),
        ("stripes", (2, 3, 2, 1)),
        ("arrow", (2, 2, 2)),
        ("star", (5, 5, 1)),
        ("star", (2, 2, 2, 2, 2)),
        ("fc", (3, 2, 2)),
        ("order", (2, 2, 2, 1)),
        ("chain", (2, 1, 2, 1)),
    ],
)
def test_compiled_equals_dense_reference(kind: str, widths: tuple[int, ...]) -> None:
    compare(*model_and_reference(kind, widths, 7), 8)
