"""Kernels and their gradients against GPyTorch."""

from collections.abc import Iterator

import gpytorch.kernels as gp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from structured_dgp.kernels import RBF, Kernel, Linear, Matern12, Matern32, Matern52, Periodic, RationalQuadratic

Array = NDArray[np.float64]

VARIANCE, ALPHA = 0.7, 1.7
LENGTHSCALE, PERIOD = np.array([0.6, 1.3, 2.0]), np.array([1.1, 2.3, 0.9])


def scaled(kernel: gp.Kernel, **parameters: Array | float) -> gp.Kernel:
    """VARIANCE times a GPyTorch kernel with these parameters, in float64."""
    kernel = kernel.double()
    kernel.initialize(**{name: torch.as_tensor(value, dtype=torch.float64) for name, value in parameters.items()})
    return gp.ScaleKernel(kernel).double().initialize(outputscale=torch.tensor(VARIANCE, dtype=torch.float64))


def ard(cls: type[gp.Kernel], **settings: float) -> gp.Kernel:
    return scaled(cls(ard_num_dims=3, **settings), lengthscale=LENGTHSCALE)


PAIRS: dict[str, tuple[Kernel, gp.Kernel]] = {
    "rbf": (RBF(LENGTHSCALE, VARIANCE), ard(gp.RBFKernel)),
    "matern12": (Matern12(LENGTHSCALE, VARIANCE), ard(gp.MaternKernel, nu=0.5)),
    "matern32": (Matern32(LENGTHSCALE, VARIANCE), ard(gp.MaternKernel, nu=1.5)),
    "matern52": (Matern52(LENGTHSCALE, VARIANCE), ard(gp.MaternKernel, nu=2.5)),
    "rational quadratic": (
        RationalQuadratic(LENGTHSCALE, VARIANCE, ALPHA),
        scaled(gp.RQKernel(ard_num_dims=3), lengthscale=LENGTHSCALE, alpha=ALPHA),
    ),
    # GPyTorch has exp(-2 sin²(π d / period) / λ) with λ = lengthscale²
    "periodic": (
        Periodic(LENGTHSCALE, VARIANCE, PERIOD),
        scaled(gp.PeriodicKernel(ard_num_dims=3), lengthscale=LENGTHSCALE**2, period_length=PERIOD),
    ),
    "linear": (Linear(VARIANCE * LENGTHSCALE), scaled(gp.LinearKernel(ard_num_dims=3), variance=LENGTHSCALE[None])),
    "sum and product": (
        RBF(0.8, VARIANCE) * Linear() + Matern32(1.1, VARIANCE),
        scaled(gp.RBFKernel(), lengthscale=0.8) * gp.LinearKernel().double().initialize(variance=1.0)
        + scaled(gp.MaternKernel(nu=1.5), lengthscale=1.1),
    ),
}

each_pair = pytest.mark.parametrize("name", PAIRS)


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def points(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((6, 3))


@each_pair
def test_values_agree(name: str) -> None:
    kernel, reference = PAIRS[name]
    x, z = jnp.asarray(points(0)), jnp.asarray(points(1))
    cross, gram, diagonal = kernel.cross(x, z), kernel.gram(z), kernel.diagonal(z)
    x, z = torch.tensor(points(0)), torch.tensor(points(1))
    with torch.no_grad():
        np.testing.assert_allclose(cross, reference(x, z).to_dense().numpy(), rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(gram, reference(z).to_dense().numpy(), rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(diagonal, reference(z, diag=True).numpy(), rtol=1e-10)


@each_pair
def test_gradients_agree(name: str) -> None:
    """With respect to both sets of points, in a random combination of the entries."""
    kernel, reference = PAIRS[name]
    x, z, weights = points(2), points(3), np.random.default_rng(4).standard_normal((6, 6))

    def total(x: jax.Array, z: jax.Array) -> jax.Array:
        return jnp.sum(weights * kernel.cross(x, z))

    gradients = jax.jit(jax.grad(total, argnums=(0, 1)))(x, z)
    x, z = torch.tensor(x, requires_grad=True), torch.tensor(z, requires_grad=True)
    torch.sum(torch.tensor(weights) * reference(x, z).to_dense()).backward()
    np.testing.assert_allclose(gradients[0], x.grad.numpy(), rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(gradients[1], z.grad.numpy(), rtol=1e-9, atol=1e-11)
