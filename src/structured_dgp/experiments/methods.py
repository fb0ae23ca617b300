"""Methods by the short names of the command line: ``sgp``, ``mf-l3``, ``star-l2-adam``, ``boosting``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from structured_dgp.baselines import METHODS
from structured_dgp.exceptions import InputError

TITLES = {
    "exact": "exact GP",
    "sgp": "SGP",
    "mf": "MF",
    "star": "STAR",
    "fc": "FC",
    "chain": "chain",
    "fc_sampled": "FC sampled",
    "sghmc": "SGHMC",
    "boosting": "boosting",
    "forest": "forest",
}
"""What tables call them."""
LAYERS = {"mf": 3, "star": 3, "fc": 3, "chain": 3, "fc_sampled": 3, "sghmc": 2}
"""Layers of the deep ones, unless a number is named."""
TRAINED = ("sgp", "mf", "star", "fc", "chain", "fc_sampled")
"""Trained by gradients: they have presets, optimisers and steps."""
PLACED = (*TRAINED, "sghmc")
"""They have inducing points."""
DRAWS = 1024
"""Of the hidden layers, behind each test prediction; the paper has 1000."""

NAME = re.compile(r"(?P<method>[a-z_]+?)(?:-l(?P<layers>\d+))?(?P<adam>-adam)?")


@dataclass(frozen=True)
class Method:
    """A method with its options, and what tables call it."""

    label: str
    name: str
    options: tuple[tuple[str, Any], ...] = ()


def parse_method(
    text: str, *, preset: str = "default", max_steps: int | None = None, n_inducing: int | None = None
) -> Method:
    """The method that ``text`` names; options that it does not have are left out.

    Args:
        text: a method, ``-l2`` for two layers, ``-adam`` for training with Adam instead of natural gradients.
        preset: of those that are trained by gradients; SGHMC takes its initial hyper-parameters.
        max_steps: of those that are trained by gradients; without early stopping.
        n_inducing: of those that have inducing points.
    """
    found = NAME.fullmatch(text)
    if found is None or found["method"] not in METHODS:
        raise InputError(f"unknown method {text!r}: use one of {', '.join(METHODS)}; -l2 for two layers, or -adam.")
    name, adam = found["method"], found["adam"] is not None
    if (found["layers"] and name not in LAYERS) or (adam and name not in TRAINED):
        raise InputError(f"{text!r}: {name} has no choice of {'layers' if found['layers'] else 'optimiser'}.")
    options: dict[str, Any] = {}
    label = TITLES[name]
    if name in LAYERS:
        layers = int(found["layers"] or LAYERS[name])
        label = f"{label} L{layers}"
        options |= {"n_layers": layers, "n_draws": DRAWS}
    if name in TRAINED:
        if preset != "default":
            options["preset"] = preset
        if max_steps is not None:
            options |= {"max_steps": max_steps, "early_stopping": False}
        if adam:
            options["optimizer"] = "adam"
            label = f"{label} Adam"
    if name == "sghmc" and preset != "default":
        options["start"] = preset
    if name in PLACED and n_inducing is not None:
        options["n_inducing"] = n_inducing
    return Method(label, name, tuple(sorted(options.items())))


def method_text(name: str, options: dict[str, Any]) -> str:
    """The text from which :func:`parse_method` makes this method."""
    layers = f"-l{options['n_layers']}" if name in LAYERS and "n_layers" in options else ""
    return name + layers + "-adam" * (options.get("optimizer") == "adam")
