"""scikit-learn's checks of estimators, beside the type checks that the tests switch on."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

UNTYPED = "check_do_not_raise_errors_in_init_or_set_params"
"""Hands numbers to every parameter, which the type checks refuse: run without them."""


def run_check(estimator: Any, check: Any) -> None:
    """One check of ``parametrize_with_checks``."""
    if check.func.__name__ == UNTYPED:
        kind = type(estimator).__name__
        script = f"""
from sklearn.utils import estimator_checks
from {type(estimator).__module__} import {kind}
estimator_checks.{UNTYPED}("{kind}", {kind}())
"""
        subprocess.run([sys.executable, "-c", script], check=True)
    else:
        check(estimator)
