"""Fixed standard-normal noise that fills its space more evenly than random draws."""

from __future__ import annotations

import functools
import math

import numpy as np
from jaxtyping import Float
from scipy.special import ndtri
from scipy.stats import qmc


@functools.lru_cache(maxsize=32)
def low_discrepancy_noise(n_draws: int, n_dimensions: int, seed: int) -> Float[np.ndarray, "R T"]:
    """A scrambled Sobol' set of ``n_draws`` points, mapped to the standard normal distribution."""
    if n_dimensions == 0:
        return np.zeros((n_draws, 0))
    points = qmc.Sobol(n_dimensions, rng=np.random.default_rng(seed)).random_base2(math.ceil(math.log2(n_draws)))
    # Points of a finite-precision grid can be exactly 0: half a grid step keeps the normal quantile finite.
    noise = ndtri(np.clip(points[:n_draws], 2.0**-33, 1.0 - 2.0**-33))
    noise.flags.writeable = False
    return noise
