"""Runs representative configs of every CUDA family once, checked, on small layers: what scripts/sanitize watches."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autotune import ConvProblem
from autotune.backends import compiler_for, find, open_backend
from autotune.families import FAMILIES
from autotune.measure.harness import Harness
from autotune.trial import Config

LAYERS = (
    ConvProblem(N=2, C=64, H=13, W=18, K=32, R=3, S=3, padding=1),
    ConvProblem(N=1, C=48, H=12, W=10, K=24, R=3, S=2, stride=2, padding=(1, 2, 0, 1), dtype="s8"),
    ConvProblem(N=1, C=128, H=7, W=7, K=13, R=1, S=1, dtype="bf16"),
    ConvProblem(N=1, C=13, H=9, W=8, K=21, R=3, S=3, padding=1, dilation=2),
)


def representative(configs: Sequence[Config]) -> list[Config]:
    """The favourite, one that shares sums between blocks, and two at random."""
    split = [c for c in configs if any(name == "split_k" and value > 1 for name, value in c.knobs)]
    some = random.Random(1).sample(configs, min(2, len(configs)))
    return list(dict.fromkeys([configs[0], *split[:1], *some]))


def main() -> None:
    backend = open_backend(find("cuda"))
    # a few operand sets are enough to be right, and the tools are slow
    backend.spec = replace(backend.spec, l2_bytes=1)
    spec = find("cuda").spec
    assert spec is not None
    compiler, runs = compiler_for(spec), 0
    for problem in LAYERS:
        harness = Harness(backend, problem, seed=3)
        for family in FAMILIES:
            configs = family.configs(problem, spec) if family.kind == "cuda" else ()
            for config in representative(configs) if configs else ():
                kernel = compiler.compile(family.source(config, problem, spec))
                harness.verify(harness.load(kernel, family.launch(config, problem, spec)))
                runs += 1
                print(f"right: {config} on {problem}", flush=True)
    print(f"{runs} configs are right")


if __name__ == "__main__":
    main()
