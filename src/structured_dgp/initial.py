"""Where training starts: inducing inputs from the data, mean functions, and hyper-parameters that need no tuning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Float
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits

from structured_dgp.couplings import Coupling, check_widths
from structured_dgp.dense import Chain, DensePosterior
from structured_dgp.exceptions import InputError
from structured_dgp.kernels import (
    RBF,
    Kernel,
    Matern12,
    Matern32,
    Matern52,
    RationalQuadratic,
    Stationary,
    White,
)
from structured_dgp.likelihoods import Gaussian, Likelihood
from structured_dgp.means import linear_mean
from structured_dgp.model import DeepGP
from structured_dgp.parameters import Fixed
from structured_dgp.posterior import AbstractPosterior, Posterior
from structured_dgp.propagation import Layer
from structured_dgp.validation import as_count, as_matrix

KMEANS_ROWS = 20_000  # k-means looks at no more rows than this
KMEANS_STEPS = 30


@dataclass(frozen=True)
class Start:
    """Initial hyper-parameters for standardised data.

    Attributes:
        lengthscale: ``"dimension"`` for √D of each layer's inputs, or one number for all.
        hidden_variance: kernel variance of hidden layers; a ``Fixed`` one is not trained.
        hidden_noise: variance of white noise in hidden layers, or None for none.
        noise: variance of the Gaussian likelihood.
        hidden_scale: size of the hidden posterior factors relative to the prior.
    """

    lengthscale: Literal["dimension"] | float = "dimension"
    hidden_variance: float | Fixed = 1.0
    hidden_noise: float | None = None
    noise: float = 0.005
    hidden_scale: float = 1e-2

    def kernel(self, n_inputs: int, is_output: bool, family: type[Stationary] = RBF) -> Kernel:
        """The kernel of a layer."""
        scale = np.sqrt(n_inputs) if self.lengthscale == "dimension" else self.lengthscale
        base = family(np.full(n_inputs, float(scale)), 1.0 if is_output else self.hidden_variance)
        return base if is_output or self.hidden_noise is None else base + White(self.hidden_noise)


STARTS: dict[str, Start] = {
    "default": Start(),
    "paper": Start(lengthscale=1.0, hidden_variance=Fixed(1.0), hidden_noise=1e-3, noise=0.01, hidden_scale=1e-5),
}


KERNELS: dict[str, type[Stationary]] = {
    "rbf": RBF,
    "matern12": Matern12,
    "matern32": Matern32,
    "matern52": Matern52,
    "rational_quadratic": RationalQuadratic,
}
"""Kernels by name."""

KernelRule: TypeAlias = Callable[[int, bool], Kernel]
"""Makes the kernel of a layer from the number of its inputs and whether it is the output layer."""


def kernel_rule(kernel: Any, start: Start) -> KernelRule:
    """How each layer gets its kernel: by name with the initial values of ``start``, one for all, or by a rule."""
    if isinstance(kernel, Kernel):
        return lambda n_inputs, is_output: kernel
    if callable(kernel) and not isinstance(kernel, type):
        return kernel
    if not isinstance(kernel, str) or kernel not in KERNELS:
        raise InputError(
            f"unknown kernel {kernel!r}: use one of {', '.join(map(repr, KERNELS))}, a Kernel such as RBF(1.0), or a "
            "rule (n_inputs, is_output) -> Kernel."
        )
    return lambda n_inputs, is_output: start.kernel(n_inputs, is_output, KERNELS[kernel])


def initial_inducing(x: Float[np.ndarray, "n D"], n_inducing: int, seed: int = 0) -> Float[np.ndarray, "M D"]:
    """Centres of k-means, or all different rows when there are no more of these than ``n_inducing``."""
    n_inducing = as_count(n_inducing, "n_inducing")
    rng = np.random.default_rng(seed)
    rows = x if len(x) <= KMEANS_ROWS else x[rng.choice(len(x), KMEANS_ROWS, replace=False)]
    different = np.unique(rows, axis=0)
    if len(different) <= n_inducing:
        return different
    search = KMeans(n_inducing, n_init=1, max_iter=KMEANS_STEPS, random_state=int(rng.integers(2**31)))
    # One thread, so that the sums of k-means have one order and a seed one result.
    with warnings.catch_warnings(), threadpool_limits(1):
        # Rows that differ by rounding only leave clusters empty: these fall back on different rows themselves.
        warnings.simplefilter("ignore", ConvergenceWarning)
        centres = np.unique(search.fit(different).cluster_centers_, axis=0)
    spare = different[rng.permutation(len(different))[: n_inducing - len(centres)]]
    return np.concatenate([centres, spare])


def initial_model(
    x: Any,
    coupling: str | Coupling = "star",
    widths: Iterable[int] = (5, 5, 1),
    n_inducing: int = 128,
    *,
    start: str | Start = "default",
    kernel: str | Kernel | KernelRule = "rbf",
    likelihood: Likelihood | None = None,
    jitter: float | None = None,
    precision: str = "float64",
    seed: int = 0,
) -> DeepGP:
    """A model ready for training on standardised inputs ``x``.

    Args:
        x: training inputs (n, D), each column with mean 0 and variance 1 (or constant).
        coupling: ``"mf"``, ``"stripes"``, ``"arrow"``, ``"star"``, ``"fc"`` or a ``Coupling``; ``"chain"`` for a
            posterior whose precision couples neighbouring layers, which is dense and slow.
        widths: latent GPs of each layer, the output layer last.
        n_inducing: inducing points of each layer; never more than there are different rows.
        start: ``"default"``, ``"paper"`` (the paper's initial values), or a :class:`Start`.
        kernel: one of ``KERNELS`` by name, a ``Kernel`` for every layer, or a rule (n_inputs, is_output) -> Kernel.
        likelihood: default: Gaussian, with the noise of ``start``, one for each output.
        jitter, precision: see :class:`DeepGP`.
        seed: of k-means.
    """
    x, widths = as_matrix(x, "x"), check_widths(widths)
    if isinstance(start, str):
        if start not in STARTS:
            raise InputError(f"unknown start {start!r}: use one of {', '.join(map(repr, STARTS))} or a Start.")
        start = STARTS[start]
    make_kernel = kernel_rule(kernel, start)
    Z, h = initial_inducing(x, n_inducing, seed), x
    layers = []
    for index, width in enumerate(widths):
        is_output = index == len(widths) - 1
        W = None if is_output else linear_mean(h, width)
        layers.append(Layer(make_kernel(h.shape[1], is_output), Z, W))
        if W is not None:
            h, Z = h @ W, Z @ W
    posterior: AbstractPosterior
    if coupling == "chain":
        posterior = DensePosterior(Chain.initial(widths, len(Z), start.hidden_scale), widths)
    else:
        posterior = Posterior.initial(coupling, widths, len(Z), hidden_scale=start.hidden_scale)
    if likelihood is None:
        likelihood = Gaussian(np.full(widths[-1], start.noise))
    return DeepGP(layers, posterior, likelihood, jitter, precision)
