"""How far a set of Markov-chain samples can be trusted, and whether their marginals are normal."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from scipy import stats

from structured_dgp.exceptions import InputError

LEVEL = 0.05
"""Significance level of the normality study, before the correction for many tests."""

Chains = Float[np.ndarray, "C S *shape"]


def _split(chains: Chains) -> Float[np.ndarray, "C2 S2 D"]:
    """Each chain cut in two halves, quantities flat."""
    chains = np.asarray(chains, np.float64)
    if chains.ndim < 2 or chains.shape[1] < 4:
        raise InputError(f"chains must have shape (chains, samples, ...), at least 4 samples; got {chains.shape}.")
    half = chains.shape[1] // 2
    flat = chains.reshape(*chains.shape[:2], -1)
    return np.concatenate([flat[:, :half], flat[:, -half:]])


def _variances(split: Float[np.ndarray, "C S D"]) -> tuple[Float[np.ndarray, " D"], Float[np.ndarray, " D"]]:
    """The mean variance within chains, and the variance estimate that also counts the spread of their means."""
    n = split.shape[1]
    within = split.var(axis=1, ddof=1).mean(axis=0)
    return within, (n - 1) / n * within + split.mean(axis=1).var(axis=0, ddof=1)


def split_rhat(chains: Chains) -> Float[np.ndarray, "*shape"]:
    """√(total variance / variance within half chains) of every quantity; near 1 when the chains agree.

    Chains that stand still at different places have an infinite one, at the same place 1.
    """
    within, total = _variances(_split(chains))
    rhat = np.sqrt(np.divide(total, within, out=np.where(total > 0.0, np.inf, 1.0), where=within > 0.0))
    return rhat.reshape(np.shape(chains)[2:])


def effective_sample_size(chains: Chains) -> Float[np.ndarray, "*shape"]:
    """How many independent samples would have the same error of the mean; Geyer's initial monotone sequence."""
    split = _split(chains)
    m, n, _ = split.shape
    within, total = _variances(split)
    covariance = _autocovariance(split).mean(axis=0)
    total = np.where(total > 0.0, total, 1.0)
    correlation = 1.0 - (within - covariance * n / (n - 1)) / total
    correlation[0] = 1.0
    pairs = correlation[: 2 * (n // 2)].reshape(n // 2, 2, -1).sum(axis=1)
    # sums of neighbouring correlations: positive up to a lag, from which on they are noise, and never growing
    pairs = np.where(np.cumprod(pairs > 0.0, axis=0), pairs, 0.0)
    time = np.maximum(2.0 * np.minimum.accumulate(pairs, axis=0).sum(axis=0) - 1.0, 1.0 / np.log10(max(10, m * n)))
    return (m * n / time).reshape(np.shape(chains)[2:])


def _autocovariance(split: Float[np.ndarray, "C S D"]) -> Float[np.ndarray, "C S D"]:
    """Of each chain at all lags, by the fast Fourier transform."""
    n = split.shape[1]
    size = 1 << (2 * n - 1).bit_length()
    spectrum = np.fft.rfft(split - split.mean(axis=1, keepdims=True), n=size, axis=1)
    return np.fft.irfft(np.abs(spectrum) ** 2, n=size, axis=1)[:, :n] / n


def normality(samples: Float[np.ndarray, "S *shape"]) -> Float[np.ndarray, "*shape"]:
    """The p-value of D'Agostino and Pearson's test of normality, from skewness and kurtosis, for every quantity."""
    samples = np.asarray(samples, np.float64)
    if len(samples) < 20:
        raise InputError(f"the normality test needs at least 20 samples; got {len(samples)}.")
    return np.asarray(stats.normaltest(samples, axis=0).pvalue)


def n_refused(samples: Float[np.ndarray, "S *shape"]) -> int:
    """For how many quantities normality is refused at a level of 5 %, corrected for their number (Bonferroni)."""
    p = normality(samples)
    return int(np.sum(p < LEVEL / p.size))


def plot_normality(samples: Float[np.ndarray, "S T M"], axes: tuple[Axes, Axes] | None = None) -> tuple[Axes, Axes]:
    """The paper's study: sorted p-values of all inducing outputs, and a histogram of the least normal one.

    Below the dashed line normality is refused at a level of 5 %, corrected for the number of tests (Bonferroni).
    """
    if axes is None:
        axes = tuple(plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")[1])
    left, right = axes
    flat = np.asarray(samples, np.float64).reshape(len(samples), -1)
    p = normality(flat)
    line = LEVEL / len(p)
    left.plot(np.arange(1, len(p) + 1), np.sort(p), ".", markersize=4)
    left.axhline(line, color="C3", linestyle="--", linewidth=1, label=f"5 % / {len(p)}: {n_refused(samples)} below")
    left.set(xlabel="inducing outputs, sorted", ylabel="p-value of normality", yscale="log")
    left.legend(frameon=False)
    worst = flat[:, int(np.argmin(p))]
    right.hist(worst, bins=30, density=True, alpha=0.7, color="C0")
    place = np.linspace(worst.min(), worst.max(), 200)
    right.plot(place, stats.norm.pdf(place, worst.mean(), worst.std(ddof=1)), color="C3", label="fitted normal")
    right.set(xlabel="whitened inducing output", ylabel="density", title=f"least normal, p = {p.min():.1g}")
    right.legend(frameon=False)
    return left, right
