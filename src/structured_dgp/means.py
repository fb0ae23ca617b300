"""Mean functions: fixed linear maps that carry a layer's input on to the next layer."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float


def identity(n_inputs: int) -> Float[np.ndarray, "D D"]:
    """For a layer as wide as its input."""
    return np.eye(n_inputs)


def zero_padding(n_inputs: int, width: int) -> Float[np.ndarray, "D T"]:
    """For a layer wider than its input: the input, then zeros."""
    return np.eye(n_inputs, width)


def pca(x: Float[np.ndarray, "n D"], width: int) -> Float[np.ndarray, "D T"]:
    """For a layer narrower than its input: the first right singular vectors of ``x``, which is not centred again.

    The sign of each vector is chosen so that its entry of largest size is positive.
    """
    vectors = np.linalg.svd(x, full_matrices=False)[2]
    vectors = np.concatenate([vectors, np.zeros((max(0, width - len(vectors)), x.shape[1]))])[:width]
    signs = np.sign(vectors[np.arange(width), np.abs(vectors).argmax(axis=1)])
    return (vectors * np.where(signs == 0, 1.0, signs)[:, None]).T


def linear_mean(x: Float[np.ndarray, "n D"], width: int) -> Float[np.ndarray, "D T"]:
    """Identity, PCA projection or zero padding, whichever suits the width."""
    n_inputs = x.shape[1]
    if width == n_inputs:
        return identity(n_inputs)
    return pca(x, width) if width < n_inputs else zero_padding(n_inputs, width)
