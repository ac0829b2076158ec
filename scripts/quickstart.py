"""Runs the layer that scripts/quickstart tuned through the dispatcher and compares the output with the reference."""

from __future__ import annotations

import sys

import numpy as np

from autotune import ConvProblem, Dispatcher, Store, reference


def main(device: str, dtype: str) -> int:
    """Exit status: 0 when every element is within the tolerance."""
    problem = ConvProblem(N=16, C=64, H=92, W=160, K=32, R=3, S=3, padding=1, dtype=dtype)
    random = np.random.default_rng(0)
    activation = random.standard_normal(problem.activation_shape).astype(reference.STORAGE[problem.dtype])
    filters = (random.standard_normal(problem.filter_shape) / 24).astype(activation.dtype)

    with Store() as store:
        dispatcher = Dispatcher(store, device=device)
        choice = dispatcher.select(problem)
        if device == "cpu":
            output = dispatcher.conv2d(activation, filters, padding=1)
        else:
            import cupy

            output = dispatcher.conv2d(cupy.asarray(activation), cupy.asarray(filters), padding=1).get()

    mismatches, worst = reference.compare(problem, output, reference.conv2d(problem, activation, filters))
    print(f"dispatched {choice.match} match {choice.config}")
    print(f"{output.size} elements, {mismatches} differ from the float64 reference, largest error {worst:.2g}")
    return int(mismatches > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
