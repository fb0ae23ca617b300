"""How the time of a training step grows with the number of inducing points, width, depth and batch.

    python benchmarks/scaling.py --json scaling.json --figure scaling.png

One quantity varies at a time around the standard workload (batch 512, R=5, M=128, widths (5, 5, 1), D=9). Beside each
curve stands the exponent that was fitted to it and the one of the paper's theory for the same points: the order of the
number of operations, MF N M² τ L, STAR N M² τ L² and FC N M² τ² L².
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
from common import emit, interleave, parser
from step import Workload, our_step

SWEEPS: dict[str, tuple[int, ...]] = {
    "M": (32, 64, 128, 256, 512),
    "tau": (1, 2, 5, 10),
    "L": (1, 2, 3, 4, 6),
    "batch": (64, 128, 256, 512, 1024, 2048),
}
THEORY: dict[str, dict[str, float]] = {
    "mf": {"M": 2, "tau": 1, "L": 1, "batch": 1},
    "star": {"M": 2, "tau": 1, "L": 2, "batch": 1},
    "fc": {"M": 2, "tau": 2, "L": 2, "batch": 1},
}
"""Exponents in the limit of large sizes, where the products of features with blocks are all that counts."""


def workload(quantity: str, value: int) -> Workload:
    """The standard workload with one size changed."""
    standard = Workload(per_call=1)
    if quantity == "M":
        return replace(standard, n_inducing=value, batch=max(standard.batch, value))
    if quantity == "tau":
        return replace(standard, widths=(value, value, 1))
    if quantity == "L":
        return replace(standard, widths=(5,) * (value - 1) + (1,))
    return replace(standard, batch=value, n_inducing=min(standard.n_inducing, value))


def exponent(values: list[int], times: list[float]) -> float:
    """The slope of log time over log size, over the upper half of the sizes."""
    half = len(values) // 2
    return float(np.polyfit(np.log(values[half:]), np.log(times[half:]), 1)[0])


def measure(
    quantity: str, values: tuple[int, ...], couplings: list[str], precision: Any, repeats: int
) -> list[dict[str, Any]]:
    """Rows for all sizes and couplings of one sweep."""
    steps: dict[str, Callable[[], Any]] = {}
    for coupling in couplings:
        for value in values:
            steps[f"{coupling} {value}"] = our_step(workload(quantity, value), coupling, precision)[0]
    rows = []
    for name, row in interleave(steps, repeats).items():
        coupling, value = name.split()
        rows.append({"what": coupling, "precision": precision, "quantity": quantity, "value": int(value), **row})
    return rows


def fit(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fitted exponents beside those of the theory."""
    result = []
    for quantity in SWEEPS:
        for coupling, theory in THEORY.items():
            points = [row for row in rows if row["quantity"] == quantity and row["what"] == coupling]
            if len(points) > 2:
                values, times = [row["value"] for row in points], [row["ms_min"] for row in points]
                result.append(
                    {
                        "what": coupling,
                        "quantity": quantity,
                        "exponent": exponent(values, times),
                        "theory": theory[quantity],
                    }
                )
    return result


def draw(rows: list[dict[str, Any]], fits: list[dict[str, Any]], path: str) -> None:
    """One panel for each quantity, both axes logarithmic."""
    figure, axes = plt.subplots(1, len(SWEEPS), figsize=(4 * len(SWEEPS), 3.6), layout="constrained")
    for axis, quantity in zip(axes, SWEEPS, strict=True):
        for coupling, theory in THEORY.items():
            points = [row for row in rows if row["quantity"] == quantity and row["what"] == coupling]
            if not points:
                continue
            found = [f for f in fits if f["what"] == coupling and f["quantity"] == quantity]
            label = f"{coupling.upper()}"
            if found:
                label += f": {found[0]['exponent']:.1f} (theory {theory[quantity]:g})"
            axis.plot([row["value"] for row in points], [row["ms_min"] for row in points], "o-", label=label)
        axis.set(xscale="log", yscale="log", xlabel=quantity)
        axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("milliseconds per step")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(repeats=5)
    options.add_argument("--couplings", nargs="+", default=["mf", "star", "fc"])
    options.add_argument("--quantities", nargs="+", default=list(SWEEPS), choices=list(SWEEPS))
    options.add_argument("--precision", default="float64")
    options.add_argument("--figure", metavar="FILE", help="draw the curves")
    arguments = options.parse_args()
    rows: list[dict[str, Any]] = []
    with jax.enable_x64(True):
        for quantity in arguments.quantities:
            rows += measure(quantity, SWEEPS[quantity], arguments.couplings, arguments.precision, arguments.repeats)
            jax.clear_caches()
    fits = fit(rows)
    for row in rows:
        print(f"{row['quantity']:6s} {row['value']:5d} {row['what']:5s} {row['ms_min']:9.2f} ms")
    for found in fits:
        print(f"{found['what']:5s} over {found['quantity']:6s} {found['exponent']:5.2f}   theory {found['theory']:g}")
    if arguments.figure:
        draw(rows, fits, str(Path(arguments.figure)))
    emit(rows, arguments.json, fits=fits)


if __name__ == "__main__":
    main()
