"""Runs representative configs of every CUDA family once, checked, on small layers: what scripts/sanitize watches."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autotune import ConvProblem, Epilogue
from autotune.backends import compiler_for, find, open_backend
from autotune.device import DeviceSpec
from autotune.families import FAMILIES, Family
from autotune.measure.harness import Harness
from autotune.trial import Config

REQUANTISED = Epilogue(scale="channel", bias=True, activation="relu", out_dtype="s8")
ADDED = Epilogue(bias=True, residual=True, activation="relu")
LAYERS = (
    ConvProblem(N=2, C=64, H=13, W=18, K=32, R=3, S=3, padding=1),
    ConvProblem(N=1, C=64, H=14, W=20, K=48, R=3, S=3, padding=1, dtype="s8", epilogue=REQUANTISED),
    ConvProblem(N=1, C=512, H=5, W=33, K=64, R=3, S=3, padding=1, epilogue=ADDED),
    ConvProblem(N=1, C=128, H=7, W=7, K=13, R=1, S=1, dtype="bf16"),
    ConvProblem(N=1, C=64, H=9, W=8, K=141, R=1, S=1),
    ConvProblem(N=2, C=64, H=7, W=11, K=77, R=1, S=3, padding=(0, 1), dtype="s8", epilogue=REQUANTISED),
    ConvProblem(N=1, C=48, H=12, W=10, K=24, R=3, S=2, stride=2, padding=(1, 2, 0, 1), dtype="s8"),
    ConvProblem(N=1, C=13, H=9, W=8, K=21, R=3, S=3, padding=1, dilation=2),
)
MULTIPROCESSORS = 4  # that persistent blocks are launched for: each then walks over several tiles
EACH = 3  # configs of a family on a layer
MANY = 8  # a knob with more candidates is not covered value by value


def representative(family: Family, spec: DeviceSpec) -> list[tuple[ConvProblem, Config]]:
    """On each layer the favourite, and others that have most of the knob values that no config before has."""
    rng = random.Random(1)
    missing = {(knob.name, v) for knob in family.knobs if len(knob.candidates) <= MANY for v in knob.candidates}
    chosen = []
    for problem in LAYERS:
        configs: Sequence[Config] = family.configs(problem, spec)
        pool = rng.sample(configs, len(configs))
        for index in range(min(EACH, len(configs))):
            best = max(pool, key=lambda config: len(missing & set(config.knobs))) if index else configs[0]
            pool.remove(best)
            missing -= set(best.knobs)
            chosen.append((problem, best))
    return chosen


def main() -> None:
    backend = open_backend(find("cuda"))
    compiler = compiler_for(backend.spec)
    # a few operand sets are enough to be right, and the tools are slow
    spec = backend.spec = replace(backend.spec, l2_bytes=1, sm_count=MULTIPROCESSORS)
    families = [family for family in FAMILIES if family.kind == "cuda"]
    cases = [(family, *case) for family in families for case in representative(family, spec)]
    with ThreadPoolExecutor(16) as pool:
        kernels = list(pool.map(lambda case: compiler.compile(case[0].source(case[2], case[1], spec)), cases))
    harnesses = {problem: Harness(backend, problem, seed=3) for problem in LAYERS}
    for (family, problem, config), kernel in zip(cases, kernels, strict=True):
        harness = harnesses[problem]
        harness.verify(harness.load(kernel, family.launch(config, problem, spec)))
        print(f"right: {config} on {problem}", flush=True)
    print(f"{len(cases)} configs are right")


if __name__ == "__main__":
    main()
