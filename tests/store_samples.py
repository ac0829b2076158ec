"""Values for the tests of the store, and other processes to run them in."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from autotune.device import DeviceSpec
from autotune.problem import ConvProblem, DType, Epilogue
from autotune.trial import Config, Measurement, Provenance, Record, Status, Trial

CPU = DeviceSpec(
    kind="cpu",
    name="Example CPU @ 2.50GHz",
    arch="x86-64-avx2",
    sm_count=4,
    l2_bytes=8 << 20,
    vector_bytes=32,
    bytes_per_s=2.5e10,
    rates=((DType.F32, 1.5e11),),
)
GPU = DeviceSpec(
    kind="cuda",
    name="NVIDIA H200",
    arch="sm_90a",
    compute_capability=(9, 0),
    sm_count=132,
    smem_per_cta=232448,
    smem_per_sm=233472,
    l2_bytes=60 << 20,
    bytes_per_s=4.2e12,
    rates=((DType.F16, 7e14), (DType.F32, 5e13)),
)
PROVENANCE = Provenance(
    kernel_digest="ab" * 32,
    compiler="nvrtc 13.0",
    driver="580.95",
    clock_mhz=1980,
    temperature_c=41,
    created_at="2025-01-02T03:04:05+00:00",
)


def layer(number: int = 0) -> ConvProblem:
    """One of many different layers."""
    return ConvProblem(N=1 + number, C=16, H=14, W=14, K=32, R=3, S=3, padding=1)


def config(number: int = 0) -> Config:
    """One of many different configs; their knobs are not in the order of the alphabet."""
    return Config.of("igemm_mma", {"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 1 + number, "raster_group": 4})


def measurement(time_us: float) -> Measurement:
    return Measurement(time_us=time_us, spread_us=0.125, samples=25, launches=10, condition="cold-graph")


def trial(
    number: int = 0, *, time_us: float = 10.1, problem: ConvProblem | None = None, device: DeviceSpec = GPU
) -> Trial:
    """A correct trial of ``config(number)``."""
    return Trial(
        problem=problem or layer(),
        device=device,
        config=config(number),
        status=Status.CORRECT,
        provenance=PROVENANCE,
        measurement=measurement(time_us),
        compile_s=0.3,
        registers=168,
        spill_bytes=0,
    )


def failure(number: int = 0, status: Status = Status.COMPILE) -> Trial:
    """A failed trial of ``config(number)``."""
    return Trial(
        problem=layer(),
        device=GPU,
        config=config(number),
        status=status,
        provenance=Provenance(kernel_digest="cd", compiler="gcc 12", driver="", created_at="2025-02-03T04:05:06+00:00"),
        detail='error: it\'s "no" | good; ünïcödé',
    )


def record(
    time_us: float = 10.1, number: int = 0, *, problem: ConvProblem | None = None, device: DeviceSpec = GPU
) -> Record:
    """A verified record of ``config(number)``."""
    return Record(
        problem=problem or layer(),
        device=device,
        config=config(number),
        measurement=measurement(time_us),
        provenance=PROVENANCE,
    )


def many_records(count: int, seed: int) -> list[Record]:
    """Records of random layers, devices, times and provenance; equal layers and devices among them."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        dtype = draw.choice([DType.F16, DType.BF16, DType.F32, DType.S8])
        groups = draw.choice([1, 1, 2, 4])
        problem = ConvProblem(
            **{name: groups * draw.randint(1, 9) for name in ("C", "K")},
            **{name: draw.randint(5, 9) for name in ("H", "W")},
            N=draw.randint(0, 2),
            R=draw.randint(1, 3),
            S=draw.randint(1, 3),
            stride=(draw.randint(1, 2), draw.randint(1, 2)),
            padding=tuple(draw.randint(0, 3) for _ in range(4)),
            dilation=draw.randint(1, 2),
            groups=groups,
            dtype=dtype,
            layout=draw.choice(["nhwc", "nchw"]),
            epilogue=Epilogue(
                bias=draw.random() < 0.5,
                residual=draw.random() < 0.3,
                activation=draw.choice(["identity", "relu"]),
                scale=draw.choice(["none", "tensor", "channel"]),
            ),
        )
        found.append(
            Record(
                problem=problem,
                device=draw.choice([CPU, GPU]),
                config=Config.of(
                    f"family_{draw.randint(0, 2)}", {"z": draw.randint(-5, 2**40), "a": draw.randint(0, 9)}
                ),
                measurement=Measurement(
                    time_us=draw.choice([draw.uniform(1e-3, 1e7), float(draw.randint(1, 9)), 0.1 + 0.2, 1e-300]),
                    spread_us=draw.choice([0.0, draw.random()]),
                    samples=draw.randint(1, 99),
                    launches=draw.randint(1, 99),
                    condition=draw.choice(["cold-graph", "cold-loop"]),
                ),
                provenance=Provenance(
                    kernel_digest=f"{draw.getrandbits(256):064x}",
                    compiler=draw.choice(["nvrtc 13.0", 'gcc "12"\n|ü\u2028', ""]),
                    driver=draw.choice(["580.95", "\t"]),
                    harness=draw.randint(1, 2),
                    clock_mhz=draw.choice([None, 1980]),
                    temperature_c=draw.choice([None, -3, 41]),
                    created_at=f"2025-01-{draw.randint(1, 28):02}T00:00:00+00:00",
                ),
                verified=draw.random() < 0.8,
            )
        )
    return found


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a Python process that has this module and ``Store`` at hand; it says ``ready`` and waits for a line."""
    here = str(Path(__file__).parent)
    lead = (
        "import sys, store_samples as samples\n"
        "from autotune.store import Store, StoreError\n"
        "import alembic.command\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
    )
    path = os.pathsep.join([here, str(Path(here).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", lead + code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )


def release(process: subprocess.Popen[str]) -> None:
    """Let a started process, once it is ready, go on."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdin.write("\n")
    process.stdin.flush()


def run_at_once(code: str, arguments: list[tuple[object, ...]]) -> list[str]:
    """What so many processes print that start their work at the same time; each has to end with 0."""
    processes = [start(code, *one) for one in arguments]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    ends = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), [stderr for _, stderr in ends]
    return [stdout for stdout, _ in ends]


def in_a_fork(work: Callable[[], object], *, user: int | None = None) -> str:
    """What ``work`` returns, as text, in a forked child, which runs as another user if told so."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        outcome = "died"
        try:
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            outcome = f"{work()}"
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        finally:
            os.write(writer, outcome.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        outcome = pipe.read()
    os.waitpid(child, 0)
    return outcome
