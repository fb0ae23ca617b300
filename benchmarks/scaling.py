"""How the time of a training step grows with the number of inducing points, width, depth and batch.

    python benchmarks/scaling.py --json scaling.json --figure scaling.png

One quantity varies at a time around the standard workload (batch 512, R=5, M=128, widths (5, 5, 1), D=9). Beside each
curve stands the exponent that was fitted to it and the one of the theory: the slope of the number of multiplications at
the same points. To leading order (the paper's Sec. 3.3), these are N M² τ L for MF, N M² τ L² + M³ τ L³ for STAR, and
N M² τ² L² + M³ τ³ L³ for FC; first-layer features are the same for all samples and count less.
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
from step import Workload, our_step, unavoidable_products

SWEEPS: dict[str, tuple[int, ...]] = {
    "M": (32, 64, 128, 256, 512),
    "tau": (1, 2, 5, 10),
    "L": (1, 2, 3, 4, 6),
    "batch": (128, 256, 512, 1024, 2048),
}
COUPLINGS = ("mf", "star", "fc")


def workload(quantity: str, value: int) -> Workload:
    """The standard workload with one size changed."""
    standard = Workload(per_call=1)
    if quantity == "M":
        return replace(standard, n_inducing=value, batch=max(standard.batch, value))
    if quantity == "tau":
        return replace(standard, widths=(value, value, 1))
    if quantity == "L":
        return replace(standard, widths=(5,) * (value - 1) + (1,))
    return replace(standard, batch=value)


def multiplications(quantity: str, value: int, coupling: str) -> float:
    """How many a step needs at least, in its matrix products."""
    kinds = unavoidable_products(workload(quantity, value), coupling)
    return float(sum(a * b * c for shapes in kinds.values() for a, b, c in shapes))


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
        for coupling in COUPLINGS:
            points = [row for row in rows if row["quantity"] == quantity and row["what"] == coupling]
            if len(points) > 2:
                values = [row["value"] for row in points]
                found = exponent(values, [row["ms_min"] for row in points])
                theory = exponent(values, [multiplications(quantity, value, coupling) for value in values])
                result.append({"what": coupling, "quantity": quantity, "exponent": found, "theory": theory})
    return result


def draw(rows: list[dict[str, Any]], fits: list[dict[str, Any]], path: str) -> None:
    """One panel for each quantity, both axes logarithmic."""
    figure, axes = plt.subplots(1, len(SWEEPS), figsize=(4 * len(SWEEPS), 3.6), layout="constrained")
    for axis, quantity in zip(axes, SWEEPS, strict=True):
        for coupling in COUPLINGS:
            points = [row for row in rows if row["quantity"] == quantity and row["what"] == coupling]
            if not points:
                continue
            found = [f for f in fits if f["what"] == coupling and f["quantity"] == quantity]
            label = f"{coupling.upper()}"
            if found:
                label += f": {found[0]['exponent']:.1f} (theory {found[0]['theory']:.1f})"
            axis.plot([row["value"] for row in points], [row["ms_min"] for row in points], "o-", label=label)
        axis.set(xscale="log", yscale="log", xlabel=quantity)
        axis.set_xticks(SWEEPS[quantity], [str(value) for value in SWEEPS[quantity]])
        axis.minorticks_off()
        axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("milliseconds per step")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(repeats=5)
    options.add_argument("--couplings", nargs="+", default=list(COUPLINGS))
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
        print(f"{found['what']:5s} over {found['quantity']:6s} {found['exponent']:5.2f}   theory {found['theory']:.2f}")
    if arguments.figure:
        draw(rows, fits, str(Path(arguments.figure)))
    emit(rows, arguments.json, fits=fits)


if __name__ == "__main__":
    main()
