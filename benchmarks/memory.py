"""Peak memory of a training step and of training on a table of 45,730 rows.

    python benchmarks/memory.py --json memory.json

Every case runs in a process of its own. ``temporary_mb`` is what the compiled step asks for beside its arguments;
``peak_mb`` the largest resident size of the process, ``import_mb`` of that what importing the libraries takes.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

from common import emit, parser

CASES = [f"{coupling} {precision}" for precision in ("float64", "mixed") for coupling in ("mf", "star", "fc")]
ROWS = 45_730
STEPS = 20


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0


def one_case(case: str) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from step import Workload

    from structured_dgp.initial import initial_model
    from structured_dgp.training import Settings, train
    from structured_dgp.training.step import Minibatches, compile_steps, initial_state

    imported = peak_mb()
    coupling, precision = case.split()
    work, settings = Workload(), Settings()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, work.n_inputs))
    y = np.sin(x.sum(1, keepdims=True))
    model = initial_model(x, coupling, work.widths, work.n_inducing, precision=precision)
    with jax.enable_x64(True):
        optimizer = settings.make_optimizer(model, ROWS)
        steps = compile_steps(model, optimizer, n_samples=work.n_samples, n_data=ROWS, chunk=1)
        arrays = (jnp.asarray(part[: work.batch], model.dtype) for part in (x, y))
        rows = Minibatches(work.batch, work.batch, 0).rows(0, 1)
        state, key = initial_state(model, optimizer), jax.random.key(0)
        lowered = steps.compiled.lower(state, steps.fixed, steps.n_data, *arrays, rows, 1, key)
        found = lowered.compile().memory_analysis()
    train(model, x, y, max_steps=STEPS, score_every=STEPS)
    return {
        "what": coupling,
        "precision": precision,
        "temporary_mb": found.temp_size_in_bytes / 2**20,
        "arguments_mb": found.argument_size_in_bytes / 2**20,
        "import_mb": imported,
        "peak_mb": peak_mb(),
        "rows": ROWS,
    }


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--cases", nargs="+", default=CASES)
    options.add_argument("--one", help="run this case in this process and print JSON")
    arguments = options.parse_args()
    if arguments.one:
        print(json.dumps(one_case(arguments.one)))
        return
    rows = []
    for case in arguments.cases:
        command = [sys.executable, __file__, "--one", case]
        rows.append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout))
        row = rows[-1]
        print(f"{case:14s} step {row['temporary_mb']:6.0f} MB, training {row['peak_mb']:6.0f} MB", flush=True)
    emit(rows, arguments.json)


if __name__ == "__main__":
    main()
