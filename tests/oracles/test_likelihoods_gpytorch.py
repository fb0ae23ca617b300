"""Expected log densities and predictions against GPyTorch's likelihoods."""

from __future__ import annotations

from typing import Any

import gpytorch
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from structured_dgp.likelihoods import Bernoulli, Gaussian, Likelihood, StudentT, gauss_hermite

Array = NDArray[np.float64]
N = 6
rng = np.random.default_rng(0)
MEAN, VAR, Y = rng.normal(size=N), rng.uniform(0.05, 2.0, N), rng.normal(0.0, 2.0, N)
LOG_CDF = 2e-3  # largest error of gpytorch.functions.log_normal_cdf, just below -1
LABELS = np.array([0.0, 1.0, 1.0, 0.0, 1.0, 0.0])


def theirs(likelihood: Any, y: Array) -> Array:
    """GPyTorch's expected log density at each point."""
    f = gpytorch.distributions.MultivariateNormal(torch.tensor(MEAN), torch.diag(torch.tensor(VAR)))
    return likelihood.double().expected_log_prob(torch.tensor(y), f).detach().numpy()


def ours(likelihood: Likelihood, y: Array) -> Array:
    with jax.enable_x64(True):
        arguments = (jnp.asarray(y[:, None]), jnp.asarray(MEAN[None, :, None]), jnp.asarray(VAR[None, :, None, None]))
        return np.asarray(likelihood.expected_log_prob(*arguments))[0]


@pytest.mark.parametrize("variance", [0.01, 1.5])
def test_gaussian(variance: float) -> None:
    other = gpytorch.likelihoods.GaussianLikelihood().double()
    other.noise = variance
    np.testing.assert_allclose(ours(Gaussian(variance=other.noise.item()), Y), theirs(other, Y), rtol=1e-10)


@pytest.mark.parametrize(("scale", "df"), [(0.3, 3.0), (1.5, 8.0)])
def test_student_t(scale: float, df: float) -> None:
    """The same Gauss-Hermite rule of 20 points on both sides; GPyTorch keeps its points in single precision."""
    other = gpytorch.likelihoods.StudentTLikelihood().double()
    other.noise, other.deg_free = scale**2, df
    assert gpytorch.settings.num_gauss_hermite_locs.value() == StudentT().n_points
    same = StudentT(scale=np.sqrt(other.noise.item()), df=other.deg_free.item())
    np.testing.assert_allclose(ours(same, Y), theirs(other, Y), rtol=1e-6)


def test_the_quadrature_of_a_probit_bernoulli() -> None:
    """GPyTorch's Bernoulli has a probit link and ours a logit link, so only the quadrature can be compared.

    GPyTorch approximates log Φ by a rational function that is off by up to LOG_CDF.
    """
    with jax.enable_x64(True):
        sign = jnp.asarray(2.0 * LABELS - 1.0)[:, None]
        mean, var = jnp.asarray(MEAN[None, :, None]), jnp.asarray(VAR[None, :, None])
        got = gauss_hermite(lambda f: jax.scipy.special.log_ndtr(sign * f), mean, var, Bernoulli().n_points)
    want = theirs(gpytorch.likelihoods.BernoulliLikelihood(), LABELS)
    np.testing.assert_allclose(got[0, :, 0], want, rtol=0, atol=LOG_CDF)


def test_logit_bernoulli_against_torch() -> None:
    """The logit link, with torch's Bernoulli and GPyTorch's quadrature."""
    quadrature = gpytorch.utils.quadrature.GaussHermiteQuadrature1D().double()
    f = torch.distributions.Normal(torch.tensor(MEAN), torch.tensor(VAR).sqrt())
    want = quadrature(lambda f: torch.distributions.Bernoulli(logits=f).log_prob(torch.tensor(LABELS)), f)
    np.testing.assert_allclose(ours(Bernoulli(), LABELS), want.numpy(), rtol=1e-6)
