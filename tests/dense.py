"""A deep Gaussian process in plain NumPy, written to be read next to the paper: the reference for the library's tests.

Nothing here is fast. Every matrix of Theorem 1 is formed, in the paper's unwhitened variables and with its names:

    paper                               here                 shape
    K_MM^l  (jitter included)           K_MM[j]              (M, M)
    calK^l = I_{T_l} (x) K^l            np.kron(eye, K)      (T_l M, T_l M)
    calK~_nM, all layers so far         Kt_nM                (T, T M), one row per GP
    mu_M, S_M                           mu_M, S_M            (T M,), (T M, T M)
    mu~_n, S~_n                         mu_t, S_t            (T,), (T, T)
    muhat_n^l, Sigmahat_n^l             mu_hat, Sigma_hat    (T_l,), (T_l, T_l)

The flat order of GPs is layer by layer, the flat order of inducing outputs is layer, GP, inducing point.
A model holds whitened variational parameters, v ~ N(m, C C^T): its inducing outputs are f_M = L_K v, K_MM = L_K L_K^T.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.linalg import block_diag, solve_triangular

Array = NDArray[np.float64]
Pattern = NDArray[np.bool_]


# --- The model ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DenseLayer:
    """One layer of `width` GPs that share an RBF-ARD kernel and inducing inputs; it hands on f + h W."""

    Z: Array  # (M, D_in) inducing inputs
    W: Array | None  # (D_in, width) linear mean function; None: zero
    lengthscale: Array  # (D_in,)
    variance: float
    width: int


@dataclass(frozen=True, eq=False)
class DenseDGP:
    """Layers (the last is the output), the whitened posterior N(mean, factor factorᵀ), Gaussian noise per output."""

    layers: tuple[DenseLayer, ...]
    mean: Array  # (T, M)
    factor: Array  # (T M, T M)
    noise: Array  # (P,) variances
    jitter: float = 1e-6

    def __post_init__(self) -> None:
        T, M = self.mean.shape
        assert sum(self.widths) == T, "one row of `mean` per GP"
        assert self.factor.shape == (T * M, T * M)
        assert self.noise.shape == (self.widths[-1],)
        d_in = self.layers[0].Z.shape[1]
        for layer in self.layers:
            assert layer.Z.shape == (M, d_in)
            assert layer.lengthscale.shape == (d_in,)
            assert layer.W is None or layer.W.shape == (d_in, layer.width)
            d_in = layer.width

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(layer.width for layer in self.layers)

    @property
    def n_inducing(self) -> int:
        return self.mean.shape[1]


def rbf(a: Array, b: Array, lengthscale: Array, variance: float) -> Array:
    """k(a_i, b_j) = variance · exp(-½ Σ_d (a_id - b_jd)² / lengthscale_d²), shape (len(a), len(b))."""
    difference = (a[:, None, :] - b[None, :, :]) / lengthscale
    return variance * np.exp(-0.5 * np.sum(difference**2, axis=-1))


def cov_inducing(layer: DenseLayer, jitter: float) -> Array:
    """K_MM of one layer, jitter included: the covariance of the inducing outputs of each of its GPs."""
    return rbf(layer.Z, layer.Z, layer.lengthscale, layer.variance) + jitter * np.eye(len(layer.Z))


def cross_cov(layer: DenseLayer, h: Array) -> Array:
    """K_nM between the rows of h and the inducing inputs."""
    return rbf(h, layer.Z, layer.lengthscale, layer.variance)


def linear_mean(layer: DenseLayer, h: Array) -> Array:
    """h W, or zeros; h may have leading axes."""
    return np.zeros((*h.shape[:-1], layer.width)) if layer.W is None else h @ layer.W


def unwhiten(dgp: DenseDGP) -> tuple[Array, Array, Array]:
    """mu_M = L m, S_M = L C Cᵀ Lᵀ, and the prior covariance L Lᵀ, where L = blockdiag of L_K over all GPs."""
    K_MM = [cov_inducing(layer, dgp.jitter) for layer in dgp.layers]
    L = block_diag(*[np.kron(np.eye(w), np.linalg.cholesky(K)) for w, K in zip(dgp.widths, K_MM, strict=True)])
    prior = block_diag(*[np.kron(np.eye(w), K) for w, K in zip(dgp.widths, K_MM, strict=True)])
    return L @ dgp.mean.ravel(), L @ dgp.factor @ dgp.factor.T @ L.T, prior


# --- Theorem 1 ------------------------------------------------------------------------------------


class Propagation(NamedTuple):
    hidden: list[Array]  # per hidden layer (R, n, T_l): f + h W, the inputs of the next layer
    mean: Array  # (R, n, P) of the outputs given the hidden layers
    cov: Array  # (R, n, P, P)


def propagate(dgp: DenseDGP, x: Array, eps: Array) -> Propagation:
    """Theorem 1, one Monte-Carlo sample and one data point at a time; eps (R, n, T_hidden): noise of the hidden GPs."""
    (T, M), (R, n), P = dgp.mean.shape, eps.shape[:2], dgp.widths[-1]
    assert n == len(x)
    assert eps.shape[2] == T - P
    K_MM = [cov_inducing(layer, dgp.jitter) for layer in dgp.layers]
    mu_M, S_M, prior = unwhiten(dgp)
    hidden = [np.empty((R, n, width)) for width in dgp.widths[:-1]]
    mean, cov = np.empty((R, n, P)), np.empty((R, n, P, P))

    for r, i in np.ndindex(R, n):
        h = x[i]  # input of the present layer
        f = np.empty(0)  # GP values of all layers before it, mean functions excluded
        Kt_nM, K_nn = np.zeros((T, T * M)), np.zeros(T)
        for j, layer in enumerate(dgp.layers):
            before, now = slice(0, len(f)), slice(len(f), len(f) + layer.width)
            # calK~_nM = I_{T_l} (x) K_nM K_MM⁻¹: one row per GP, filled at the GP's own inducing points
            Kt_row = np.linalg.solve(K_MM[j], cross_cov(layer, h[None])[0])
            for g in range(now.start, now.stop):
                Kt_nM[g, g * M : (g + 1) * M] = Kt_row
            K_nn[now] = layer.variance

            # mu~ = calK~_nM mu_M,   S~ = δ calK_nn - calK~_nM (δ calK_MM - S_M) calK~_Mn,   over all GPs so far
            mu_t = (Kt_nM @ mu_M)[: now.stop]
            S_t = (np.diag(K_nn) - Kt_nM @ (prior - S_M) @ Kt_nM.T)[: now.stop, : now.stop]

            # muhat = mu~^l + S~^{l,1:l-1} (S~^{1:l-1,1:l-1})⁻¹ (f^{1:l-1} - mu~^{1:l-1})
            # Sigmahat = S~^{ll} - S~^{l,1:l-1} (S~^{1:l-1,1:l-1})⁻¹ S~^{1:l-1,l}
            mu_hat = mu_t[now] + S_t[now, before] @ np.linalg.solve(S_t[before, before], f - mu_t[before])
            Sigma_hat = S_t[now, now] - S_t[now, before] @ np.linalg.solve(S_t[before, before], S_t[before, now])

            if j == len(dgp.layers) - 1:
                mean[r, i], cov[r, i] = mu_hat + linear_mean(layer, h), Sigma_hat
            else:
                f_l = mu_hat + np.linalg.cholesky(Sigma_hat) @ eps[r, i, now]
                f, h = np.concatenate([f, f_l]), f_l + linear_mean(layer, h)
                hidden[j][r, i] = h
    return Propagation(hidden, mean, cov)


# --- The evidence lower bound ---------------------------------------------------------------------


def kl(dgp: DenseDGP) -> float:
    """KL[N(mu_M, S_M) ‖ N(0, K)], K = blockdiag(K_MM): ½ (tr K⁻¹S_M + mu_Mᵀ K⁻¹ mu_M - TM + log|K| - log|S_M|)."""
    mu_M, S_M, prior = unwhiten(dgp)
    trace = np.trace(np.linalg.solve(prior, S_M))
    square = mu_M @ np.linalg.solve(prior, mu_M)
    return float(0.5 * (trace + square - len(mu_M) + np.linalg.slogdet(prior)[1] - np.linalg.slogdet(S_M)[1]))


def expected_log_lik(y: Array, mean: Array, cov: Array, noise: Array) -> Array:
    """E[log N(y | f, diag(noise))] for f ~ N(mean, cov): log N(y | mean, diag(noise)) - ½ Σ_p cov_pp / noise_p."""
    var = np.diagonal(cov, axis1=-2, axis2=-1)
    return np.sum(-0.5 * np.log(2 * np.pi * noise) - 0.5 * ((y - mean) ** 2 + var) / noise, axis=-1)


def elbo(dgp: DenseDGP, x: Array, y: Array, eps: Array, n_data: int) -> float:
    """(n_data / n) Σ_n mean_r E[log p(y_n | f_n)] - KL, for a batch x (n, D), y (n, P) of n_data points."""
    out = propagate(dgp, x, eps)
    data_term = expected_log_lik(y, out.mean, out.cov, dgp.noise).mean(axis=0).sum()
    return float(n_data / len(x) * data_term - kl(dgp))


# --- Brute force: no marginalisation --------------------------------------------------------------


def sample_outputs(dgp: DenseDGP, x: Array, n_samples: int, rng: Generator) -> tuple[Array, list[Array]]:
    """Outputs (n_samples, n, P) and hidden values [(n_samples, n, T_l)], drawn step by step from q(f_N, f_M).

    One draw of all inducing outputs per sample, then layer after layer f_n^l ~ p(f_n^l | f_M^l; f_n^{l-1}), each GP and
    each point by itself: right for every point's own distribution over all layers, not for the joint one of two points.
    """
    T, M = dgp.mean.shape
    v = dgp.mean + (rng.standard_normal((n_samples, T * M)) @ dgp.factor.T).reshape(n_samples, T, M)
    h = np.broadcast_to(x, (n_samples, *x.shape))
    hidden: list[Array] = []
    first = 0
    for layer in dgp.layers:
        K_MM = cov_inducing(layer, dgp.jitter)
        f_M = v[:, first : first + layer.width] @ np.linalg.cholesky(K_MM).T
        K_nM = cross_cov(layer, h.reshape(-1, h.shape[-1])).reshape(n_samples, len(x), M)
        Kt_nM = K_nM @ np.linalg.inv(K_MM)
        Kt_nn = layer.variance - np.sum(Kt_nM * K_nM, axis=-1)
        noise = rng.standard_normal((n_samples, len(x), layer.width))
        f = Kt_nM @ f_M.transpose(0, 2, 1) + np.sqrt(Kt_nn)[..., None] * noise
        h = f + linear_mean(layer, h)
        hidden.append(h)
        first += layer.width
    return hidden[-1], hidden[:-1]


# --- Couplings: [i, k] is True when GP k strictly precedes GP i -----------------------------------


def gp_labels(widths: Sequence[int]) -> list[tuple[int, int]]:
    """(layer, position) of every GP in flat order."""
    return [(layer, t) for layer, width in enumerate(widths) for t in range(width)]


def _pattern(widths: Sequence[int], precedes: Callable[[tuple[int, int], tuple[int, int]], bool]) -> Pattern:
    labels = gp_labels(widths)
    return np.array([[precedes(k, i) for k in labels] for i in labels], dtype=bool)


def mean_field(widths: Sequence[int]) -> Pattern:
    return _pattern(widths, lambda k, i: False)


def stripes(widths: Sequence[int]) -> Pattern:
    output = len(widths) - 1
    return _pattern(widths, lambda k, i: k[0] < i[0] < output and k[1] == i[1])


def arrow(widths: Sequence[int]) -> Pattern:
    output = len(widths) - 1
    return _pattern(widths, lambda k, i: k[0] < output and i[0] == output)


def stripes_and_arrow(widths: Sequence[int]) -> Pattern:
    return stripes(widths) | arrow(widths)


def fully_coupled(widths: Sequence[int]) -> Pattern:
    return _pattern(widths, lambda k, i: k < i)


patterns: dict[str, Callable[[Sequence[int]], Pattern]] = {
    "mf": mean_field,
    "stripes": stripes,
    "arrow": arrow,
    "star": stripes_and_arrow,
    "fc": fully_coupled,
}


def transitive_closure(relation: Pattern) -> Pattern:
    """Add every k → j → i until nothing is new."""
    closed = relation.astype(bool)
    while True:
        longer = closed | (closed.astype(int) @ closed.astype(int) > 0)
        if np.array_equal(longer, closed):
            return closed
        closed = longer


def random_relation(rng: Generator, widths: Sequence[int], density: float = 0.3) -> Pattern:
    """Random pairs k before i in the flat order; in general not transitive."""
    return fully_coupled(widths) & (rng.random((sum(widths), sum(widths))) < density)


def random_order(rng: Generator, widths: Sequence[int], density: float = 0.3) -> Pattern:
    """A random partial order along the flat order."""
    return transitive_closure(random_relation(rng, widths, density))


def block(matrix: Array, i: int, k: int, M: int) -> Array:
    """Block [i, k] of a (T M, T M) matrix: the entries between GPs i and k."""
    return matrix[i * M : (i + 1) * M, k * M : (k + 1) * M]


# --- Random models --------------------------------------------------------------------------------


def random_lower(rng: Generator, size: int, scale: float, diagonal: tuple[float, float]) -> Array:
    """Lower triangular, rows of the strict part of length about `scale`, diagonal uniform in an interval."""
    strict = np.tril(rng.standard_normal((size, size)), -1) * scale / np.sqrt(size)
    return strict + np.diag(rng.uniform(*diagonal, size))


def random_factor(rng: Generator, pattern: Pattern, M: int, scale: float = 0.4) -> Array:
    """(T M, T M): entries N(0, scale²/M) in the blocks i > k with pattern[i, k], lower-triangular blocks [i, i]."""
    T = len(pattern)
    C = np.zeros((T * M, T * M))
    for i in range(T):
        for k in range(i):
            if pattern[i, k]:
                block(C, i, k, M)[...] = rng.standard_normal((M, M)) * scale / np.sqrt(M)
        block(C, i, i, M)[...] = random_lower(rng, M, scale, (0.4, 0.9))
    return C


def chain_factor(rng: Generator, widths: Sequence[int], M: int, scale: float = 0.8) -> Array:
    """C = B⁻¹ with B lower block-bidiagonal over layers: a block-tridiagonal precision BᵀB, Markov over layers."""
    sizes = [width * M for width in widths]
    ends = np.cumsum(sizes)
    B = np.zeros((ends[-1], ends[-1]))
    for layer, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        rows = slice(end - size, end)
        B[rows, rows] = random_lower(rng, size, scale, (1.1, 2.0))
        if layer > 0:
            before = slice(end - size - sizes[layer - 1], end - size)
            B[rows, before] = rng.standard_normal((size, sizes[layer - 1])) * scale / np.sqrt(sizes[layer - 1])
    return solve_triangular(B, np.eye(len(B)), lower=True)


def random_projection(rng: Generator, d_in: int, d_out: int) -> Array:
    """(d_in, d_out) with orthonormal columns, as of a PCA; with orthonormal rows if the layer widens."""
    Q = np.linalg.qr(rng.standard_normal((max(d_in, d_out), min(d_in, d_out))))[0]
    return Q if d_in >= d_out else Q.T


def random_dgp(
    rng: Generator,
    n_inputs: int,
    widths: Sequence[int],
    M: int,
    pattern: Pattern,
    *,
    noise: float | Sequence[float] = 0.1,
    scale: float = 0.4,
    has_mean: Sequence[bool] | None = None,
    jitter: float = 1e-6,
) -> DenseDGP:
    """A model of moderate size everywhere. `has_mean` says which layers get a random W; by default the hidden ones."""
    has_mean = [True] * (len(widths) - 1) + [False] if has_mean is None else has_mean
    layers = []
    for d_in, width, linear in zip([n_inputs, *widths[:-1]], widths, has_mean, strict=True):
        layers.append(
            DenseLayer(
                Z=1.5 * rng.standard_normal((M, d_in)),
                W=random_projection(rng, d_in, width) if linear else None,
                lengthscale=np.sqrt(d_in) * rng.uniform(0.7, 1.4, d_in),
                variance=rng.uniform(0.6, 1.4),
                width=width,
            )
        )
    return DenseDGP(
        layers=tuple(layers),
        mean=rng.standard_normal((sum(widths), M)),
        factor=random_factor(rng, pattern, M, scale),
        noise=np.broadcast_to(np.asarray(noise, dtype=float), (widths[-1],)).copy(),
        jitter=jitter,
    )


# --- One layer: everything in closed form ---------------------------------------------------------


def _log_normal(y: Array, cov: Array) -> float:
    """log N(y | 0, cov)."""
    return float(-0.5 * (y @ np.linalg.solve(cov, y) + np.linalg.slogdet(cov)[1] + len(y) * np.log(2 * np.pi)))


def exact_gp_log_evidence(lengthscale: Array, variance: float, x: Array, y: Array, noise: Array) -> float:
    """Σ_p log N(y_p | 0, K_NN + noise_p I) for y (n, P), noise (P,): independent outputs with one kernel."""
    K_NN = rbf(x, x, lengthscale, variance)
    return sum(_log_normal(y_p, K_NN + noise_p * np.eye(len(x))) for y_p, noise_p in zip(y.T, noise, strict=True))


def collapsed_bound(layer: DenseLayer, x: Array, y: Array, noise: Array, jitter: float = 1e-6) -> float:
    """Titsias (2009): Σ_p log N(y_p | x W_p, Q + noise_p I) - tr(K_NN - Q) / (2 noise_p), Q = K_NM K_MM⁻¹ K_MN.

    The largest ELBO of any one-layer model with these inducing inputs; with Z = X and no jitter, the log evidence.
    """
    K_NM = cross_cov(layer, x)
    Q = K_NM @ np.linalg.solve(cov_inducing(layer, jitter), K_NM.T)
    residual = y - linear_mean(layer, x)
    missing = len(x) * layer.variance - np.trace(Q)
    return sum(
        _log_normal(r_p, Q + noise_p * np.eye(len(x))) - 0.5 * missing / noise_p
        for r_p, noise_p in zip(residual.T, noise, strict=True)
    )


def optimal_posterior(layer: DenseLayer, x: Array, y: Array, noise: Array, jitter: float = 1e-6) -> tuple[Array, Array]:
    """The whitened m (P, M), C (P M, P M) that attain `collapsed_bound`; with Z = X, the exact posterior at the data.

    With features A = K_NM L_K⁻ᵀ the model is Bayesian linear regression y = x W + A v + noise, v ~ N(0, I).
    """
    A = np.linalg.solve(np.linalg.cholesky(cov_inducing(layer, jitter)), cross_cov(layer, x).T).T
    residual = y - linear_mean(layer, x)
    means, factors = [], []
    for r_p, noise_p in zip(residual.T, noise, strict=True):
        precision = np.eye(A.shape[1]) + A.T @ A / noise_p
        means.append(np.linalg.solve(precision, A.T @ r_p / noise_p))
        factors.append(np.linalg.cholesky(np.linalg.inv(precision)))
    return np.stack(means), block_diag(*factors)


def svgp_elbo(dgp: DenseDGP, x: Array, y: Array, n_data: int) -> float:
    """Hensman et al. (2013), Eq. (4), for one layer of independent outputs, with q(u_p) = N(m_p, S_p) per output.

    Σ_n [log N(y_n | k_nᵀ K⁻¹ m_p, β⁻¹) - ½ β k~_nn - ½ tr(S_p Λ_n)] - KL[q(u_p) ‖ p(u_p)],  Λ_n = β K⁻¹ k_n k_nᵀ K⁻¹
    """
    (layer,) = dgp.layers
    K, M = cov_inducing(layer, dgp.jitter), dgp.n_inducing
    L, K_inv = np.linalg.cholesky(K), np.linalg.inv(K)
    total = 0.0
    for p in range(layer.width):
        assert all(not np.any(block(dgp.factor, p, k, M)) for k in range(layer.width) if k != p), "outputs are coupled"
        C_p = block(dgp.factor, p, p, M)
        m_p, S_p, beta = L @ dgp.mean[p], L @ C_p @ C_p.T @ L.T, 1 / dgp.noise[p]
        for x_n, y_n in zip(x, y[:, p], strict=True):
            k_n = cross_cov(layer, x_n[None])[0]
            error = y_n - linear_mean(layer, x_n)[p] - k_n @ K_inv @ m_p
            Lambda_n = beta * np.outer(K_inv @ k_n, K_inv @ k_n)
            log_density = 0.5 * np.log(beta / (2 * np.pi)) - 0.5 * beta * error**2
            k_tilde = layer.variance - k_n @ K_inv @ k_n
            total += n_data / len(x) * (log_density - 0.5 * beta * k_tilde - 0.5 * np.trace(S_p @ Lambda_n))
        log_det_ratio = np.linalg.slogdet(K)[1] - np.linalg.slogdet(S_p)[1]
        total -= 0.5 * (np.trace(K_inv @ S_p) + m_p @ K_inv @ m_p - M + log_det_ratio)
    return float(total)
