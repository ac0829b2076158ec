"""The C++ header: compiled without a warning and run, it finds what was stored and nothing else."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from store_samples import CPU, GPU, config, layer, many_records, measurement, record

from autotune.problem import ConvProblem, Epilogue
from autotune.store import Store, header, rows
from autotune.trial import Config, Record

# every record is looked up by its key; what is said of it is printed
_PRINT_ALL = r"""
#include "table.hpp"
#include <cstdio>
int main() {
  for (const autotune::Record& stored : autotune::records) {
    const autotune::Record* found = autotune::find(stored.device, stored.layer);
    if (found != &stored) return 1;
    std::printf("%.*s|%.*s|%.*s|%.17g|%d", int(found->device.size()), found->device.data(), int(found->family.size()),
                found->family.data(), int(found->config.size()), found->config.data(), found->time_us, found->verified);
    for (std::size_t i = 0; i < found->knob_count; ++i)
      std::printf("|%.*s=%lld", int(found->knobs[i].name.size()), found->knobs[i].name.data(),
                  static_cast<long long>(found->knobs[i].value));
    std::printf("\n");
  }
}
"""

# known when it is compiled
_CONSTANT = r"""
#include "table.hpp"
using namespace autotune;
constexpr Layer layer{1, 16, 14, 14, 32, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, "f16", "nhwc", "identity", "f16"};
constexpr const Record* found = find("NVIDIA H200 x132", layer);
static_assert(found->family == "igemm_mma" && found->time_us == 10.1 && found->verified);
static_assert(found->knob("cta_m", 0) == 128 && found->knob("stages", 0) == 4 && found->knob("absent", -1) == -1);
static_assert(find("NVIDIA H200 x66", layer) == nullptr);
constexpr Layer wider{1, 16, 14, 15, 32, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, "f16", "nhwc", "identity", "f16"};
static_assert(find("NVIDIA H200 x132", wider) == nullptr);
constexpr Layer biased{1, 16, 14, 14, 32, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, "f16", "nhwc", "bias", "f16"};
static_assert(find("NVIDIA H200 x132", biased)->config == "other\303\274-\"x\"1");
int main() { return 0; }
"""


def run(tmp_path: Path, program: str, records: list[Record]) -> str:
    """What a program prints that includes the table of these records, in two translation units."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler: install g++")
    with Store(":memory:") as store:
        store.merge(records)
        (tmp_path / "table.hpp").write_text(header.text(store.records()))
    (tmp_path / "main.cpp").write_text(program)
    (tmp_path / "other.cpp").write_text('#include "table.hpp"\n#include "table.hpp"\n')
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]
    built = subprocess.run(
        [compiler, *flags, "main.cpp", "other.cpp", "-o", "main"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout


def test_every_record_is_found_by_its_key(tmp_path: Path) -> None:
    records = many_records(300, 4)
    with Store(":memory:") as store:
        store.merge(records)
        stored = store.records()
    lines = run(tmp_path, _PRINT_ALL, records).splitlines()
    expected = [
        "|".join(
            [
                *(one.device.key, one.family, one.config.name, f"{one.time_us:.17g}", f"{one.verified:d}"),
                *(f"{name}={value}" for name, value in one.config.knobs),
            ]
        )
        for one in stored
    ]
    assert sorted(lines) == sorted(expected)


def test_a_look_up_is_a_constant_expression(tmp_path: Path) -> None:
    biased = ConvProblem(**_EXTENTS, padding=1, epilogue=Epilogue(bias=True))
    odd = replace(record(problem=biased), config=Config.of("otherü", {'"x"': 1}))
    records = [record(10.1, 3), record(9.0, device=CPU), odd, *(record(problem=layer(i)) for i in range(1, 9))]
    assert run(tmp_path, _CONSTANT, records) == ""


def test_an_empty_table_finds_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, _PRINT_ALL, []) == ""


def test_the_layer_has_the_columns_of_the_database() -> None:
    names = [name.upper() if len(name) == 1 else name for name in rows.LAYER_COLUMNS]
    text = header.text([replace(record(), measurement=measurement(0.1 + 0.2), config=config(7))])
    assert f"  std::int64_t {', '.join(names[:16])};\n  std::string_view {', '.join(names[16:])};\n" in text
    assert f'{{"{GPU.key}", {{1, 16, 14, 14, 32, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, "f16",' in text
    assert "0.30000000000000004, true}," in text
    assert header.text([]) == header.text(iter([]))


_EXTENTS = {"N": 1, "C": 16, "H": 14, "W": 14, "K": 32, "R": 3, "S": 3}
