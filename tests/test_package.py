"""The package as it is shipped: a light import, a wheel that works away from the checkout, scripts that run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYER = ["--device", "cpu", "--dtype", "f32", "--input", "1x8x6x6", "--filters", "8", "--kernel", "3x3"]
HEAVY = {"alembic", "cuda", "cupy", "matplotlib", "numpy", "optuna", "platformdirs", "rich", "sqlalchemy", "typer"}


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Standard output of a command, which must succeed. PYTHONPATH is not handed on."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=inherited | environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, built from the sdist, and this environment's other packages."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", ROOT, cwd=folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel, cwd=folder)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    # folders named in a .pth file are searched last, and their own .pth files, an editable checkout's, are not read
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


def test_import_is_light() -> None:
    code = "import sys, autotune; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = run(sys.executable, "-c", code, cwd=ROOT).split()
    assert "autotune" in loaded
    assert HEAVY.isdisjoint(loaded)


def test_every_public_name_exists() -> None:
    code = "import autotune; print(*[name for name in autotune.__all__ if getattr(autotune, name) is not None])"
    names = run(sys.executable, "-c", code, cwd=ROOT).split()
    assert {"ConvProblem", "Epilogue", "Store", "Dispatcher", "tune", "devices"} <= set(names)


def test_wheel_finds_its_own_kernels_and_migrations(installed: Path, tmp_path: Path) -> None:
    code = "from autotune.resources import folder; print(folder('kernels')); print(folder('db'))"
    kernels, db = map(Path, run(installed / "python", "-c", code, cwd=tmp_path).splitlines())
    assert kernels.is_relative_to(installed.parent)
    assert db.is_relative_to(installed.parent)
    assert {path.relative_to(ROOT / "kernels") for path in (ROOT / "kernels").rglob("*.c*")} == {
        path.relative_to(kernels) for path in kernels.rglob("*.c*")
    }
    assert {path.name for path in (ROOT / "db" / "migrations" / "versions").glob("*.py")} == {
        path.name for path in (db / "migrations" / "versions").glob("*.py")
    }


def test_wheel_tunes_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    database = tmp_path / "tuning.db"
    cache = {"AUTOTUNE_CACHE": str(tmp_path / "cache"), "AUTOTUNE_DB": str(database)}
    assert "winner" in run(installed / "autotune", "tune", *LAYER, "--trials", "2", cwd=tmp_path, **cache)
    assert "exact" in run(installed / "autotune", "query", *LAYER, "--exact", cwd=tmp_path, **cache)
    assert "sound" in run(installed / "autotune", "db", "check", cwd=tmp_path, **cache)
    assert database.is_file()
    assert list((tmp_path / "cache").iterdir())


def test_checkout_runs_as_a_module(tmp_path: Path) -> None:
    cache = {"AUTOTUNE_DB": str(tmp_path / "tuning.db")}
    assert "winner" in run(sys.executable, "-m", "autotune", "tune", *LAYER, "--trials", "2", cwd=ROOT, **cache)
    assert "sound" in run(sys.executable, "-m", "autotune", "db", "check", cwd=ROOT, **cache)


def test_a_checkout_without_its_dependencies_says_so_in_one_line() -> None:
    # without site there are no installed packages
    done = subprocess.run(
        [sys.executable, "-S", "-m", "autotune"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"autotune: No module named '\w+': .*pip install \.\n", done.stderr)


@pytest.mark.parametrize("script", ["scripts/check", "scripts/quickstart", ".ci/run"])
def test_scripts_are_executable_and_parse(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    run("bash", "-n", script, cwd=ROOT)


def environment_script(command: str, folder: Path, **programs: str) -> subprocess.CompletedProcess[str]:
    """Run a function of scripts/environment.sh where PATH holds little more than ``programs``, name: script."""
    for name, script in programs.items():
        program = folder / name
        program.write_text(f"#!/bin/bash\n{script}\n")
        program.chmod(0o755)
    for name in ("basename", "dirname"):
        (folder / name).symlink_to(next(p for d in ("/usr/bin", "/bin") if (p := Path(d) / name).exists()))
    source = f"source {shlex.quote(str(ROOT / 'scripts' / 'environment.sh'))}; {command}"
    bash = ["/bin/bash", "-c", source, "check"]
    return subprocess.run(bash, env={"PATH": str(folder)}, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("driver", "extra"),
    [
        ("echo 580.65.06; echo 580.65.06", "cuda13"),
        ("echo 595.1", "cuda13"),
        ("echo 579.99", "cuda12"),
        ("echo 525.60", "cuda12"),
        ("echo 470.82", ""),
        ("echo 'NVIDIA-SMI has failed'; exit 9", ""),
        ("exit 127", ""),
    ],
)
def test_the_cuda_extra_fits_the_driver(driver: str, extra: str, tmp_path: Path) -> None:
    done = environment_script("cuda_extra", tmp_path, **{"nvidia-smi": driver})
    assert (done.returncode, done.stdout.strip()) == (0, extra)


def test_no_gpu_needs_no_extra(tmp_path: Path) -> None:
    done = environment_script("cuda_extra", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_first_python_that_is_new_enough_is_taken(tmp_path: Path) -> None:
    done = environment_script("find_python", tmp_path, **{"python3.12": "exit 1", "python3.11": "exit 0"})
    assert (done.returncode, done.stdout) == (0, "python3.11\n")


def test_no_python_is_said_in_one_line(tmp_path: Path) -> None:
    done = environment_script("find_python", tmp_path, python3="exit 1")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "needs Python 3.11 or newer" in done.stderr


def test_the_python_example_of_the_readme_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    small = example.replace("N=16, C=64, H=92, W=160, K=32", "N=1, C=8, H=6, W=7, K=8").replace("trials=24", "trials=2")
    assert small.count("=8, H=6") == small.count("trials=2)") == 1
    # every corner sees 4 of the 9 taps of 8 channels of ones
    output = run(sys.executable, "-c", f"{small}\nprint(y.shape, y[0, 0, 0, 0], y[0, 3, 3, 7])", cwd=tmp_path)
    assert output.split("\n")[0] == "(1, 6, 7, 8) 32.0 72.0"
