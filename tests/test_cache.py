"""The cache of compiled kernels: what its key holds, damage, directories that cannot be written, concurrent writers."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.backends import CompiledKernel, CompileError, cache
from autotune.families import Source

SOURCE = Source(language="c", stem="kernel", text='#include "kernel.c"\n', entry="run")


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A folder of kernel sources, kernel.c including deep.h through header.h, and an empty cache."""
    folder = tmp_path / "kernels"
    (folder / "include").mkdir(parents=True)
    (folder / "kernel.c").write_text('#include "header.h"\n#include <stdint.h>\nvoid run(void) {}\n')
    (folder / "include" / "header.h").write_text('  #  include "deep.h"\n')
    (folder / "include" / "deep.h").write_text("int deep;\n")
    (folder / "unused.h").write_text("int unused;\n")
    cached = tmp_path / "cache"
    cached.mkdir()
    monkeypatch.setattr(cache, "folder", {"kernels": folder}.__getitem__)
    monkeypatch.setattr(cache, "directory", lambda: cached)
    return folder


class Builder:
    """Stands for a compiler: writes the source's text and counts."""

    def __init__(self, text="binary"):
        self.text, self.built = text, 0
        self._lock = threading.Lock()

    def __call__(self, target):
        with self._lock:
            self.built += 1
        target.write_text(self.text)
        return CompiledKernel(path="", entry="run", digest="", compiler="cc 1", compile_s=0.0, registers=7, log="said")


def compiled(source=SOURCE, compiler="cc 1", options=("-O3",), suffix=".so", build=None):
    return cache.compiled(source, compiler, options, suffix, build or Builder())


def test_a_second_request_is_answered_from_the_cache(kernels):
    build = Builder()
    first, second = compiled(build=build), compiled(build=build)
    assert build.built == 1
    assert Path(first.path).read_text() == "binary"
    assert first.path.endswith(".so")
    assert Path(first.path).name.startswith("kernel-")
    assert first.compile_s > 0
    assert second == replace(first, compile_s=0.0)
    assert (second.registers, second.log, second.compiler) == (7, "said", "cc 1")
    assert sorted(p.suffix for p in Path(first.path).parent.iterdir()) == [".json", ".so"]


@pytest.mark.parametrize("name", ["kernel.c", "include/header.h", "include/deep.h"])
def test_the_content_of_every_included_file_is_in_the_key(kernels, name):
    before, digest = compiled(), cache.digest(SOURCE)
    path = kernels / name
    path.write_text(path.read_text() + "/* changed */\n")
    after = compiled()
    assert after.path != before.path
    assert after.digest == cache.digest(SOURCE) != digest == before.digest


def test_other_files_and_the_configs_own_text_are_not_in_the_digest(kernels):
    digest = cache.digest(SOURCE)
    (kernels / "unused.h").write_text("int other;\n")
    (kernels / "stdint.h").write_text("int other;\n")
    assert cache.digest(SOURCE) == digest
    assert cache.digest(replace(SOURCE, text="#define pixels 3\n" + SOURCE.text)) == digest
    total = hashlib.sha256()
    for name in ("kernel.c", "include/header.h", "include/deep.h"):
        total.update(Path(name).name.encode() + b"\0" + (kernels / name).read_bytes() + b"\0")
    assert digest == total.hexdigest()


@pytest.mark.parametrize(
    "changed",
    [
        {"source": replace(SOURCE, text="#define pixels 3\n" + SOURCE.text)},
        {"source": replace(SOURCE, entry="walk")},
        {"compiler": "cc 2"},
        {"options": ("-O2",)},
        {"options": ("-O3", "cpu=other")},
    ],
    ids=str,
)
def test_text_entry_compiler_and_options_are_in_the_key(kernels, changed):
    assert compiled(**changed).path != compiled().path


def test_a_missing_include_is_named(kernels):
    source = replace(SOURCE, text='#include "absent.h"\n')
    with pytest.raises(FileNotFoundError, match=r"^a kernel includes absent\.h, which is in none of "):
        compiled(source)


@pytest.mark.parametrize(
    "damage", ["truncated", "zeroed", "binary gone", "facts gone", "facts cut", "facts foreign", "facts odd"]
)
def test_a_damaged_entry_is_built_again(kernels, damage):
    path = Path(compiled().path)
    facts = path.with_suffix(".json")
    stored = json.loads(facts.read_text())
    if damage == "truncated":
        path.write_text("bin")
    elif damage == "zeroed":
        path.write_text("\0" * len("binary"))
    elif damage == "binary gone":
        path.unlink()
    elif damage == "facts gone":
        facts.unlink()
    elif damage == "facts cut":
        facts.write_text(facts.read_text()[:20])
    elif damage == "facts foreign":
        facts.write_text("[1, 2]")
    else:
        facts.write_text(json.dumps(stored | {"unknown": 1}))
    build = Builder()
    again = compiled(build=build)
    assert build.built == 1
    assert again.path == str(path)
    assert path.read_text() == "binary"
    assert json.loads(facts.read_text()) == stored | {"compile_s": again.compile_s}


def test_a_directory_that_was_deleted_is_made_again(kernels):
    shutil.rmtree(Path(compiled().path).parent)
    assert Path(compiled().path).read_text() == "binary"


def test_a_failed_build_leaves_nothing(kernels):
    def fail(target):
        target.write_text("half")
        raise CompileError("error: no")

    with pytest.raises(CompileError, match="no"):
        compiled(build=fail)
    assert list(cache.directory().iterdir()) == []


def test_concurrent_writers_all_get_a_whole_binary(kernels):
    text = "x" * 1_000_000
    build = Builder(text)
    gate = threading.Barrier(8)

    def request(_):
        gate.wait()
        kernel = compiled(build=build)
        return kernel.path, len(Path(kernel.path).read_bytes())

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(request, range(8)))
    assert found == {(compiled().path, len(text))}
    assert 1 <= build.built <= 8
    # nothing half-built is left
    assert len(list(cache.directory().iterdir())) == 2


def asked_directory(wanted):
    """What a process and a child of it say."""
    ask = "from autotune.backends import cache; print(cache.directory(), flush=True)"
    code = f"{ask}; import subprocess, sys; subprocess.run([sys.executable, '-c', {ask!r}], check=True)"
    environment = os.environ | {"AUTOTUNE_CACHE": str(wanted)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    own, childs = done.stdout.splitlines()
    assert own == childs
    return Path(own)


def test_the_directory_is_made_where_it_is_wanted(tmp_path):
    wanted = tmp_path / "a b" / "ü#?%"
    assert asked_directory(wanted) == wanted
    assert list(wanted.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_replaced_for_children_too(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    found = asked_directory(tmp_path / "file" / "below")
    assert found.name.startswith("conv-autotune-")
    # empty, and hence made anew
    found.rmdir()
