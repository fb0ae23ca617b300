"""The sparse GP and the mean-field deep GP against GPyTorch's, on the same parameters and noise."""

from __future__ import annotations

from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.models.deep_gps import DeepGPLayer

from structured_dgp import RBF, DeepGP, Gaussian, Layer, Posterior

RNG = np.random.default_rng(0)
M, N, D = 9, 15, 3
JITTER = 1e-8
X = RNG.standard_normal((N, D))
Y = RNG.standard_normal((N, 1))


def tensor(a: Any) -> torch.Tensor:
    return torch.as_tensor(np.array(a), dtype=torch.float64)


class TorchLayer(DeepGPLayer):  # type: ignore[misc]
    """One layer of independent GPs that share kernel and inducing inputs, with q(v) = N(mean, factor factorᵀ)."""

    def __init__(self, Z: np.ndarray, ell: np.ndarray, s2: float, mean: np.ndarray, factor: np.ndarray) -> None:
        width, m = mean.shape
        batch = torch.Size([width])
        q = gpytorch.variational.CholeskyVariationalDistribution(m, batch_shape=batch)
        strategy = gpytorch.variational.VariationalStrategy(
            self, tensor(Z), q, learn_inducing_locations=False, jitter_val=JITTER
        )
        super().__init__(strategy, Z.shape[1], width)
        self.mean_module = gpytorch.means.ZeroMean(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=Z.shape[1]))
        self.double()
        self.covar_module.initialize(outputscale=s2)
        self.covar_module.base_kernel.initialize(lengthscale=tensor(ell))
        q.variational_mean.data = tensor(mean)
        q.chol_variational_covar.data = tensor(factor)
        strategy.variational_params_initialized.fill_(1)

    def forward(self, x: torch.Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def marginals(self, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance (R, n, T) at inputs (R, n, D)."""
        inputs = tensor(h).unsqueeze(-3).expand(h.shape[0], self.output_dims, *h.shape[1:])
        with torch.no_grad():
            out = self.variational_strategy(inputs)
        return tuple(np.swapaxes(part.numpy(), 1, 2) for part in (out.mean, out.variance))  # type: ignore[return-value]

    def kl(self) -> float:
        with torch.no_grad():
            return float(self.variational_strategy.kl_divergence().sum())


def random_parts(widths: tuple[int, ...]) -> tuple[DeepGP, list[TorchLayer]]:
    """The same random model twice; no mean functions."""
    sizes = [D, *widths[:-1]]
    n_gps = sum(widths)
    mean = RNG.standard_normal((n_gps, M))
    factors = np.tril(0.2 * RNG.standard_normal((n_gps, M, M))) + 0.7 * np.eye(M)
    dense = np.zeros((n_gps * M, n_gps * M))
    for gp in range(n_gps):
        dense[gp * M : (gp + 1) * M, gp * M : (gp + 1) * M] = factors[gp]
    ours, theirs, first = [], [], 0
    for size, width in zip(sizes, widths, strict=True):
        Z, ell, s2 = 1.5 * RNG.standard_normal((M, size)), RNG.uniform(0.7, 1.5, size), RNG.uniform(0.5, 1.5)
        gps = slice(first, first + width)
        ours.append(Layer(RBF(ell, s2), Z))
        theirs.append(TorchLayer(Z, ell, s2, mean[gps], factors[gps]))
        first += width
    return DeepGP(ours, Posterior.from_dense("mf", widths, mean, dense), Gaussian(0.3), jitter=JITTER), theirs


def test_a_sparse_gp_has_the_same_bound() -> None:
    model, (layer,) = random_parts((1,))
    mean, variance = layer.marginals(X[None])
    np.testing.assert_allclose(model.propagate(X, np.zeros((1, N, 0))).mean, mean, rtol=1e-6, atol=1e-6)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double().initialize(noise=0.3)
    with torch.no_grad():
        f = gpytorch.distributions.MultivariateNormal(tensor(mean[0, :, 0]), torch.diag(tensor(variance[0, :, 0])))
        data = float(likelihood.expected_log_prob(tensor(Y[:, 0]), f).sum())
    np.testing.assert_allclose(float(model.elbo(X, Y)), data - layer.kl(), rtol=1e-6)


def test_a_mean_field_deep_gp_agrees_layer_by_layer() -> None:
    widths = (2, 3, 2)
    model, layers = random_parts(widths)
    eps = RNG.standard_normal((4, N, sum(widths[:-1])))
    out = model.propagate(X, eps)
    h, first = np.broadcast_to(X, (4, N, D)), 0
    for level, (layer, width) in enumerate(zip(layers, widths, strict=True)):
        mean, variance = layer.marginals(h)
        if level == len(widths) - 1:
            np.testing.assert_allclose(out.mean, mean, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(np.diagonal(out.cov, axis1=2, axis2=3), variance, rtol=1e-6, atol=1e-6)
            break
        h = mean + np.sqrt(variance) * eps[..., first : first + width]
        np.testing.assert_allclose(out.hidden[level], h, rtol=1e-6, atol=1e-6)
        first += width
    np.testing.assert_allclose(float(model.kl()), sum(layer.kl() for layer in layers), rtol=1e-6)
