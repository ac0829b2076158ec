"""Deliberate faults of kernels, and the fixed suite of cases on the host that has to find them."""

from __future__ import annotations

import random
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from conftest import EDGE_PROBLEMS
from gpu_models import GPU_MODELS
from host_execution import Case

from autotune.families import Family
from autotune.problem import ConvProblem, DType, Epilogue
from autotune.resources import folder


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of a file in kernels/: ``old``, which occurs there once, becomes ``new``. family: whose suite runs."""

    name: str
    family: str
    file: str
    old: str
    new: str

    def apply(self, kernels: Path) -> None:
        """Change the copy of the sources in this folder; ValueError when ``old`` does not occur exactly once."""
        path = kernels / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {text.count(self.old)} times in {self.file}")
        path.write_text(text.replace(self.old, self.new))


def suite(family: Family) -> list[Case]:
    """Cases that together have every value of every knob that the layers allow, and some more configs of each layer."""
    rng = random.Random(family.name)
    layers = [EDGE_PROBLEMS(dtype)[name] for dtype in ("f16", "s8") for name in _LAYERS] + list(_LARGE)
    covered: set[tuple[str, int]] = set()
    found: list[Case] = []
    # few multiprocessors: blocks walk over many tiles; one of them also has all filters
    for layer, sm_count in [(layer, 3) for layer in (*layers, *_FINISHED)] + [(layer, 1) for layer in _LARGE]:
        models = [spec for spec in GPU_MODELS.values() if family.unsupported(layer, spec) is None]
        if not models:
            continue
        spec = replace(rng.choice(models), sm_count=sm_count)
        configs = list(family.configs(layer, spec))
        rng.shuffle(configs)
        chosen = configs[: 3 if layer in _LARGE else 1]
        covered |= {knob for config in chosen for knob in config.knobs}
        for config in configs:
            if not covered.issuperset(config.knobs):
                chosen.append(config)
                covered |= set(config.knobs)
        found += [Case(family, config, layer, spec) for config in chosen]
    for layer in _CLUSTERED:
        spec = replace(GPU_MODELS["sm_90a"], sm_count=3)
        clusters = [config for config in family.configs(layer, spec) if dict(config.knobs).get("cluster", 1) > 1]
        found += [Case(family, config, layer, spec) for config in rng.sample(clusters, min(len(clusters), 3))]
    return found


_LAYERS = (
    *(
        "plain-3x3",
        "stride-and-dilation",
        "asymmetric-padding",
        "unequal-strides",
        "even-2x2",
        "grouped",
        "grouped-odd",
    ),
    *("c21-k13", "pointwise", "stem-7x7-c3", "deep", "row-1x7"),
)
_LARGE = (
    ConvProblem(N=2, C=40, H=24, W=26, K=72, R=3, S=3, padding=1),
    ConvProblem(N=1, C=48, H=32, W=21, K=20, R=3, S=3, padding=(2, 1), stride=(2, 1)),
    ConvProblem(N=1, C=24, H=40, W=30, K=13, R=3, S=2, padding=(0, 2, 3, 1), dilation=(2, 1)),
    ConvProblem(N=1, C=64, H=22, W=18, K=24, R=3, S=3, padding=1, stride=2, dtype="s8"),
    ConvProblem(N=1, C=32, H=17, W=40, K=64, R=2, S=3, padding=1),
    ConvProblem(N=2, C=64, H=30, W=33, K=16, R=3, S=1, padding=(1, 0), dtype="s8"),
    ConvProblem(N=1, C=6, H=40, W=9, K=12, R=17, S=2, padding=(9, 1)),
    ConvProblem(N=3, C=96, H=18, W=17, K=264, R=1, S=1, dtype="s8"),
    ConvProblem(N=1, C=256, H=9, W=8, K=128, R=3, S=3, padding=1),
    ConvProblem(N=1, C=32, H=21, W=11, K=69, R=1, S=1, dtype="s8", epilogue=Epilogue(out_dtype=DType.S8)),
    ConvProblem(N=1, C=16, H=13, W=8, K=141, R=1, S=1),
    ConvProblem(N=1, C=64, H=19, W=22, K=8, R=3, S=3, padding=1, dilation=(1, 2)),
)

# an odd number of tiles of 64 pixels, enough slices to be split, filters by eights and not
_CLUSTERED = (
    ConvProblem(N=1, C=256, H=9, W=17, K=128, R=3, S=3, padding=1),
    ConvProblem(N=1, C=128, H=9, W=17, K=76, R=3, S=3, padding=1, dtype="s8"),
)

# adjacent filters of a thread: as many as there are, two, one by one
_EPILOGUES = (
    ("scale_channel+bias+residual+relu", "f16", "f16", 64),
    ("scale_tensor+bias+relu", "f16", "f32", 13),
    ("bias+residual+relu", "f16", "f16", 20),
    ("scale_channel", "f16", "f16", 24),
    ("scale_channel", "f16", "f32", 13),
    ("scale_channel+bias+relu", "s8", "s8", 64),
    ("scale_channel+bias+residual", "s8", "f32", 64),
    ("scale_tensor+bias+residual+relu", "s8", "f16", 13),
    ("bias+relu", "s8", "s32", 24),
    ("identity", "s8", "s8", 20),
)
_FINISHED = tuple(
    ConvProblem(
        **{"N": 2, "C": 16, "H": 9, "W": 11, "K": filters, "R": 3, "S": 3, "padding": 1, "dtype": dtype},  # type: ignore[arg-type]
        epilogue=Epilogue.parse(text, DType.of(out)),
    )
    for text, dtype, out, filters in _EPILOGUES
)


def mutations() -> list[Mutation]:
    """Those in tests/mutations: a file there for each of kernels, whose family's suite runs unless it names another."""
    found = []
    for path in sorted((Path(__file__).parent / "mutations").glob("*.toml")):
        name = f"{path.stem}.cuh"
        file = name if (folder("kernels") / name).is_file() else f"include/{name}"
        entries = tomllib.loads(path.read_text())["mutation"]
        found += [Mutation(**{"family": path.stem, "file": file} | entry) for entry in entries]
    return found
