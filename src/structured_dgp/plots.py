"""Pictures. Every function draws on axes that it is given, or on new ones, and returns them."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from structured_dgp.training.history import History


def plot_history(history: History, axes: Axes | None = None, *, against: str = "step") -> Axes:
    """The ELBO over steps, or ``against="seconds"``, and the hold-out score on a second axis if there is one.

    The lower end of the axis leaves out the first steps, in which the ELBO is far from where it will be.
    """
    axes = plt.subplots(layout="constrained")[1] if axes is None else axes
    place, elbo = history[against], history["elbo"]
    axes.plot(place, elbo, color="C0", label="ELBO")
    axes.set(xlabel="step" if against == "step" else against, ylabel="ELBO")
    if len(elbo):
        low, high = np.quantile(elbo, 0.2), np.max(elbo)
        margin = 0.05 * max(high - low, 1e-6 * max(abs(high), 1.0))
        axes.set_ylim(low - margin, high + margin)
    if history.scored:
        second = axes.twinx()
        second.plot(place, history["score"], color="C1", label="hold-out log-likelihood")
        second.set_ylabel("hold-out log-likelihood")
        lines = [*axes.get_lines(), *second.get_lines()]
        axes.legend(lines, [str(line.get_label()) for line in lines], frameon=False, loc="lower right")
    return axes
