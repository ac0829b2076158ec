"""The command line: what each verb prints, and how a mistake is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from autotune import cli
from autotune.backends import find
from autotune.cli import tables
from autotune.cli.options import stated_layer
from autotune.problem import ConvProblem, DType, Epilogue
from autotune.store import exchange

ROOT = Path(__file__).resolve().parents[1]
LAYER = ["--input", "1x8x6x7", "--filters", "8", "--kernel", "3x3", "--padding", "1", "--dtype", "f32"]
PROBLEM = ConvProblem(N=1, C=8, H=6, W=7, K=8, R=3, S=3, padding=1, dtype="f32")
CPU = ["--device", "cpu"]
QUERY_KEYS = {"match", "family", "config", "time_us", "device", "verified", "why"}


@dataclass(frozen=True)
class Ran:
    """What one command line did."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def autotune(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command line in this process."""

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        status = cli.run([str(argument) for argument in arguments])
        return Ran(status, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database, its name unlike a plain path's, with three trials of LAYER on the cpu."""
    database = tmp_path_factory.mktemp("cli") / "tuned ü #1%20?.db"
    assert cli.run(["tune", *CPU, *LAYER, "--trials", "3", "--db", str(database)]) == 0
    return database


def commands() -> dict[str, Any]:
    """Every verb, ``db check`` among them, with typer's object for it."""
    found = {}
    for name, command in typer.main.get_command(cli.app).commands.items():  # type: ignore[attr-defined]
        for inner, verb in getattr(command, "commands", {"": command}).items():
            found[f"{name} {inner}".strip()] = verb
    return found


def test_the_verbs_are_those_of_the_contract() -> None:
    database = {"db check", "db stale", "db upgrade"}
    assert set(commands()) == {"devices", "tune", "query", "trials", "export", "import", *database}


@pytest.mark.parametrize("verb", ["", "db", *commands()])
def test_help(verb: str, autotune: Any) -> None:
    ran = autotune(*verb.split(), "--help")
    assert ran.status == 0
    assert ran.out.startswith(f"Usage: autotune {verb}".strip())


@pytest.mark.parametrize("verb", commands())
def test_every_verb_and_option_is_documented(verb: str) -> None:
    assert f"autotune {verb}" in (ROOT / "README.md").read_text()
    command = commands()[verb]
    assert command.help
    for parameter in command.params:
        assert parameter.help, f"{verb} {parameter.name} has no help"


@pytest.mark.parametrize("verb", commands())
def test_every_verb_prints_json(verb: str) -> None:
    assert "--json" in {name for parameter in commands()[verb].params for name in parameter.opts}


# the verbs that read a database, query apart, which has an answer without one
READING = [
    ("trials", *CPU, *LAYER),
    ("export",),
    ("tune", *CPU, "--stale"),
    *(("db", verb) for verb in ("check", "stale", "upgrade")),
]
MISTAKES = [
    ((), 2, "Missing command"),
    (("tun",), 2, "tun"),
    (("tune",), 2, "--input"),
    (("tune", "--input", "3x4"), 2, "'3x4' is not NxCxHxW"),
    (("tune", "--input", "1x8x6x7", "--kernel", "3x3"), 2, "--filters"),
    (("tune", *LAYER, "--kernel", "3"), 2, "'3' is not RxS"),
    (("tune", *LAYER, "--stride", "1,2"), 2, "'1,2' is not A or AxB"),
    (("tune", *LAYER, "--padding", "1,2"), 2, "'1,2' is not A, AxB or T,B,L,R"),
    (("tune", *LAYER, "--dtype", "f64"), 2, "'f64' is not one of f16, bf16, tf32, f32, s8, e4m3"),
    (("tune", *LAYER, "--dtype", "s32"), 2, "'s32' is not one of"),
    (("tune", *LAYER, "--layout", "chwn"), 2, "'chwn' is not one of nhwc, nchw"),
    (("tune", *LAYER, "--activation", "gelu"), 2, "'gelu' is not one of identity, relu"),
    (("query", *LAYER, "--stride", ""), 2, "'' is not A or AxB"),
    (("query", *LAYER, "--dtype", ""), 2, "'' is not one of f16, bf16, tf32, f32, s8, e4m3"),
    (("query", *LAYER, "--scale", ""), 2, "'' is not one of none, tensor, channel"),
    (("tune", *LAYER, "--input", "1x8x6x2147483648"), 1, "W must be below 2**31"),
    (("tune", *LAYER, "--trials", "0"), 2, "--trials"),
    (("tune", *LAYER, "--trials", "-3"), 2, "--trials"),
    (("tune", *LAYER, "--seconds", "0"), 2, "--seconds"),
    (("tune", *LAYER, "--seconds", "nan"), 2, "--seconds"),
    (("tune", *LAYER, "--input", "0x8x6x7"), 1, "the batch is empty"),
    (("tune", *LAYER, "--device", "gpu"), 2, "unknown device 'gpu'"),
    (("tune", *LAYER, "--colour", "red"), 2, "--colour"),
    (("tune", "--layer", "conv1"), 2, "not a layer's canonical text: 'conv1'"),
    (("tune", "--layer", str(PROBLEM), "--stride", "2", "--bias"), 2, "leave out --stride, --bias"),
    (("tune", *LAYER, "--groups", "3"), 1, "groups must divide C: 3 does not divide 8"),
    (("tune", *LAYER, "--kernel", "9x3"), 1, "output extent P is 0"),
    (("tune", *LAYER, "--input", "1x0x6x7"), 1, "C must be at least 1, not 0"),
    (("tune", *LAYER, "--padding", "-1"), 1, "padding must not be negative, not -1"),
    (("tune", *CPU, *LAYER, "--dtype", "f16"), 1, "f32"),
    (("tune", *LAYER, "--device", "cuda:99"), 1, "cuda:99"),
    (("query", *LAYER, "--device", "cuda:99"), 1, "cuda:99"),
    (("trials", *CPU, *LAYER, "--db", ":memory:"), 1, "no device 'cpu' in the database"),
    (("export", "--format", "yaml"), 2, "'yaml' is not one of jsonl, csv, markdown"),
    (("export", "--out", "/absent/folder/table", "--db", ":memory:"), 1, "/absent/folder"),
    (("export", "--json"), 2, "--out PATH"),
    *(
        ((*verb, "--db", "/absent/mistyped.db"), 1, "/absent/mistyped.db: there is no database")
        for verb in (("query", *CPU, *LAYER), *READING)
    ),
    (("import",), 2, "FILE"),
    (("import", "/absent/table.jsonl"), 1, "/absent/table.jsonl"),
    (("db", "check", "--db", "/dev/null"), 1, "/dev/null"),
    (("db", "check", "--db", "nosuch://host/name"), 1, "nosuch"),
]


@pytest.mark.parametrize(("arguments", "status", "cause"), MISTAKES)
def test_a_mistake_is_told_in_one_line(
    arguments: tuple[str, ...], status: int, cause: str, autotune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "new.db"))
    ran = autotune(*arguments)
    assert (ran.status, ran.out) == (status, "")
    assert cause in ran.err
    (line,) = [line for line in ran.err.splitlines() if not line.startswith("device: ")]
    assert line.startswith("autotune")


@pytest.mark.parametrize("verb", READING, ids=" ".join)
def test_a_database_that_is_to_be_read_is_not_made(
    verb: tuple[str, ...], autotune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "mistyped.db"))
    ran = autotune(*verb)
    assert (ran.status, ran.out, ran.err) == (1, "", f"autotune: {tmp_path}/mistyped.db: there is no database\n")
    assert list(tmp_path.iterdir()) == []


def test_query_without_a_database_names_the_default(
    autotune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "first.db"))
    ran = autotune("query", *CPU, *LAYER, "--json")
    assert (ran.status, ran.json["match"]) == (0, "default")
    assert ran.err == f"{tmp_path}/first.db: there is no database yet\n"
    assert list(tmp_path.iterdir()) == []


def test_query_tells_the_record(tuned: Path, autotune: Any) -> None:
    ran = autotune("query", *CPU, *LAYER, "--exact", "--json", "--db", tuned)
    assert ran.status == 0
    assert ran.json.keys() >= QUERY_KEYS
    assert ran.json["match"] == "exact"
    assert ran.json["verified"] is True
    assert ran.json["layer"] == str(PROBLEM)
    assert ran.json["config"].startswith(ran.json["family"] + "-")
    assert ran.json["time_us"] > 0
    assert autotune("query", *CPU, "--layer", PROBLEM, "--json", "--db", tuned).json == ran.json


def test_query_of_another_layer_is_not_exact(tuned: Path, autotune: Any) -> None:
    other = [*CPU, *LAYER, "--input", "1x16x12x12", "--db", tuned]
    ran = autotune("query", *other, "--json")
    assert ran.status == 0
    assert ran.json["match"] in ("nearest", "default")
    assert ran.json["time_us"] is None
    assert ran.json["verified"] is False
    ran = autotune("query", *other, "--exact")
    assert (ran.status, ran.out) == (1, "")
    assert "is not tuned" in ran.err
    assert ran.err.count("\n") == 1


def test_auto_says_which_device_it_is(tuned: Path, autotune: Any) -> None:
    ran = autotune("query", *LAYER, "--json", "--db", tuned)
    assert ran.err.startswith(f"device: {find('auto').id} (")


def test_tuning_again_measures_nothing_more(tuned: Path, autotune: Any) -> None:
    before = autotune("trials", *CPU, *LAYER, "--json", "--db", tuned).json["trials"]
    ran = autotune("tune", *CPU, *LAYER, "--trials", "3", "--json", "--db", tuned)
    assert ran.status == 0
    assert ran.json.keys() >= QUERY_KEYS
    assert ran.json["measured"] == 0
    assert ran.json["trials"] == before
    assert (ran.json["config"], ran.json["time_us"]) in [(trial["config"], trial["time_us"]) for trial in before]


def test_the_winner_comes_first_then_the_others_by_time(tuned: Path, autotune: Any) -> None:
    best = autotune("query", *CPU, *LAYER, "--json", "--db", tuned).json
    trials = autotune("trials", *CPU, *LAYER, "--json", "--db", tuned).json["trials"]
    others = [trial["config"] for trial in trials if trial["config"] != best["config"]]
    lines = autotune("tune", *CPU, *LAYER, "--trials", "3", "--db", tuned).out.splitlines()
    assert "nothing measured now" in lines[3]
    assert [line.split()[-1] for line in lines if line.endswith((best["config"], *others))] == [
        *(best["config"], best["config"]),
        *others,
    ]


def test_trials_are_listed_fastest_first(tuned: Path, autotune: Any) -> None:
    ran = autotune("trials", *CPU, *LAYER, "--json", "--db", tuned)
    trials = ran.json["trials"]
    assert ran.status == 0
    assert len({trial["config"] for trial in trials}) == 3
    times = [trial["time_us"] for trial in trials if trial["status"] == "correct"]
    assert times == sorted(times)
    text = autotune("trials", *CPU, *LAYER, "--db", tuned).out
    assert all(trial["config"] in text for trial in trials)


def test_tables_go_from_one_database_to_another(tuned: Path, autotune: Any, tmp_path: Path) -> None:
    first, second, other = tmp_path / "first.jsonl", tmp_path / "second.jsonl", tmp_path / "other.db"
    ran = autotune("export", "--out", first, "--json", "--db", tuned)
    assert ran.json == {"format": "jsonl", "out": str(first), "records": 1}
    assert autotune("export", "--db", tuned).out == first.read_text()
    assert autotune("import", first, "--json", "--db", other).json["added"] == 1
    again = autotune("import", first, "--json", "--db", other).json
    assert (again["added"], again["replaced"], again["unchanged"], again["conflicts"]) == (0, 0, 1, 0)
    assert autotune("export", "--out", second, "--db", other).status == 0
    assert second.read_bytes() == first.read_bytes()
    best = autotune("query", *CPU, *LAYER, "--json", "--db", tuned).json
    assert autotune("query", *CPU, *LAYER, "--json", "--db", other).json["config"] == best["config"]


def test_the_help_names_every_format() -> None:
    assert tables.FORMATS == exchange.FORMATS


@pytest.mark.parametrize("format", ["csv", "markdown"])
def test_tables_for_people_hold_the_winner(format: str, tuned: Path, autotune: Any) -> None:
    best = autotune("query", *CPU, *LAYER, "--json", "--db", tuned).json
    text = autotune("export", "--format", format, "--db", tuned).out
    assert best["config"] in text
    assert best["device"] in text


def test_a_damaged_table_is_told_in_one_line(autotune: Any, tmp_path: Path) -> None:
    table = tmp_path / "table.jsonl"
    table.write_text("no table\n")
    ran = autotune("import", table, "--db", tmp_path / "new.db")
    assert (ran.status, ran.out) == (1, "")
    assert str(table) in ran.err
    assert ran.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [table]


def test_a_sound_database_passes(tuned: Path, autotune: Any) -> None:
    ran = autotune("db", "check", "--json", "--db", tuned)
    assert ran.status == 0
    assert ran.json["defects"] == []
    assert "sound" in autotune("db", "check", "--db", tuned).out


def test_defects_are_printed_and_fail(autotune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.store.Store.check", lambda _: ["row 1 is odd", "row 2 is odd"])
    ran = autotune("db", "check", "--db", ":memory:")
    assert (ran.status, ran.out) == (1, "row 1 is odd\nrow 2 is odd\n")


def test_a_file_that_is_no_database_is_told_and_kept(autotune: Any, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database" * 100)
    ran = autotune("db", "check", "--db", path)
    assert ran.status == 1
    assert "notes.txt" in ran.out + ran.err
    assert path.read_text() == "not a database" * 100


def test_devices_lists_the_cpu(autotune: Any) -> None:
    ran = autotune("devices", "--json")
    assert ran.status == 0
    listed = {device["id"]: device for device in ran.json["devices"]}
    assert listed["cpu"]["usable"] is True
    assert all(device["usable"] or device["reason"] for device in listed.values())
    assert "cpu" in autotune("devices").out


def test_an_interrupt_tells_what_is_kept(tuned: Path, autotune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autotune.search.tune", interrupted)
    ran = autotune("tune", *CPU, *LAYER, "--trials", "9", "--db", tuned)
    assert (ran.status, ran.out) == (1, "")
    assert "3 trials of this layer are kept" in ran.err


def test_a_bug_is_not_dressed_up(autotune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("autotune.backends.devices", bug)
    with pytest.raises(RuntimeError, match="a bug"):
        autotune("devices")


def test_a_reader_that_left_is_no_error_to_tell(tuned: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "autotune", "export", "--db", str(tuned)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("shell", ["{} /dev/stdout | cat", "{} /dev/stdout > table", "{} /dev/fd/3 3>&1 1>&2 | cat"])
def test_a_table_goes_to_an_open_stream(shell: str, tuned: Path, autotune: Any, tmp_path: Path) -> None:
    (tmp_path / "table").write_text("")
    command = shell.format(f"{sys.executable} -m autotune export --db '{tuned}' --out")
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        **{"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout + (tmp_path / "table").read_text() == autotune("export", "--db", tuned).out


def test_what_the_terminal_cannot_print_does_not_fail_a_verb(tuned: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "autotune", "export", "--db", str(tuned), "--out", str(tmp_path / "ü.jsonl")]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ascii_only, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path}/\\xfc.jsonl: 1 record written\n"


def without(descriptor: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command line in a process of its own that is started with one of its streams closed."""
    command = f"import os, sys; os.close({descriptor}); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    line = [sys.executable, "-c", command, "-m", "autotune", *arguments]
    return subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False)


def test_a_closed_stdout_is_told_in_one_line(tuned: Path) -> None:
    done = without(1, "query", *CPU, *LAYER, "--db", str(tuned))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "autotune: the result could not be printed: stdout is closed\n"


def test_notices_do_not_go_to_stdout_where_stderr_is_closed(tuned: Path) -> None:
    done = without(2, "query", *LAYER, "--db", str(tuned), "--device", "auto", "--json")
    assert done.stderr == ""
    assert not done.stdout or json.loads(done.stdout)["layer"] == str(PROBLEM)
    assert without(2, "nonsense").stdout == ""


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_json_is_json_in_every_encoding(encoding: str, tuned: Path, tmp_path: Path) -> None:
    out = os.fsdecode(os.fsencode(tmp_path) + b"/\xc3\xbc\xff.jsonl")
    command = [sys.executable, "-m", "autotune", "export", "--db", str(tuned), "--out", out, "--json"]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(command, capture_output=True, cwd=ROOT, env=environment, check=True)
    assert json.loads(done.stdout)["out"] == out


def test_notices_that_cannot_be_written_end_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "autotune", "tune", *CPU, *LAYER, "--trials", "2", "--db", str(tmp_path / "t.db")]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, cwd=ROOT, check=False)
        assert done.returncode == 0
        assert "2 measured now" in done.stdout
        wrong = subprocess.run([*command[:3], "nonsense"], stderr=full, cwd=ROOT, check=False)
        assert wrong.returncode == 2


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({}, {}),
        ({"stride": "2x1"}, {"stride": (2, 1)}),
        ({"padding": "1x2"}, {"padding": (1, 2)}),
        ({"padding": "0,1,2,3"}, {"padding": (0, 1, 2, 3)}),
        ({"dilation": "1X2"}, {"dilation": (1, 2)}),
        ({"groups": "4", "dtype": "Int8"}, {"groups": 4, "dtype": "s8"}),
        ({"layout": "NCHW", "bias": True}, {"layout": "nchw", "epilogue": Epilogue(bias=True)}),
        (
            {"dtype": "s8", "scale": "channel", "activation": "relu", "residual": True, "out_dtype": "f32"},
            {
                "dtype": "s8",
                "epilogue": Epilogue(scale="channel", activation="relu", residual=True, out_dtype=DType.F32),
            },
        ),
    ],
)
def test_options_state_the_layer(options: dict[str, Any], fields: dict[str, Any]) -> None:
    extents = {"N": 1, "C": 8, "H": 6, "W": 7, "K": 4, "R": 3, "S": 2}
    stated = stated_layer(input="1x8x6x7", filters="4", kernel="3x2", **options)
    assert stated == ConvProblem(**extents, **fields)
    assert stated_layer(layer=str(stated)) == stated
