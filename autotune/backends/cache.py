"""The cache of compiled kernels: one file a binary, named by the content of everything that went into it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import platformdirs

from autotune.backends.backend import CompiledKernel
from autotune.families.family import Source
from autotune.resources import folder

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@cache
def directory() -> Path:
    """Where binaries are kept: AUTOTUNE_CACHE, else the user's cache directory, else a new temporary one."""
    try:
        wanted = Path(os.environ.get("AUTOTUNE_CACHE") or platformdirs.user_cache_path("conv-autotune"))
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return wanted
    # platformdirs raises RuntimeError where there is no home directory
    except (OSError, RuntimeError):
        instead = tempfile.mkdtemp(prefix="conv-autotune-")
        # child processes use the same one
        os.environ["AUTOTUNE_CACHE"] = instead
        return Path(instead)


def include_directories() -> tuple[Path, ...]:
    """Where ``#include "..."`` of a source is looked up."""
    return (folder("kernels"), folder("kernels") / "include")


def digest(source: Source) -> str:
    """SHA-256 of the files that the source includes, directly or not, in the order first met."""
    total = hashlib.sha256()
    for path in _included(source.text, include_directories()):
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def _included(text: str, directories: tuple[Path, ...]) -> list[Path]:
    found: dict[Path, None] = {}
    pending = [text]
    while pending:
        for name in _INCLUDE.findall(pending.pop()):
            path = next((d / name for d in directories if (d / name).is_file()), None)
            if path is None:
                raise FileNotFoundError(
                    f"a kernel includes {name}, which is in none of {', '.join(map(str, directories))}"
                )
            if path not in found:
                found[path] = None
                pending.append(path.read_text())
    return list(found)


def compiled(
    source: Source, compiler: str, options: tuple[str, ...], suffix: str, build: Callable[[Path], CompiledKernel]
) -> CompiledKernel:
    """The cached binary of a source, or what ``build`` writes to the path it is given, published atomically.

    ``build`` returns the kernel's facts; they are kept beside the binary. A damaged entry is built again.
    """
    sources = digest(source)
    key = hashlib.sha256("\0".join([source.text, source.entry, sources, compiler, *options]).encode()).hexdigest()
    path = directory() / f"{source.stem}-{key}{suffix}"
    facts = path.with_suffix(".json")
    try:
        stored = json.loads(facts.read_text())
        if _sha256(path) == stored.pop("sha256"):
            return CompiledKernel(**stored | {"path": str(path), "compile_s": 0.0})
    except (OSError, ValueError, TypeError, KeyError):
        pass  # absent or damaged: built below
    # whoever cleans caches may have deleted it meanwhile
    directory().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory(), prefix=".building-") as scratch:
        target = Path(scratch) / path.name
        start = time.perf_counter()
        kernel = build(target)
        kernel = replace(kernel, path=str(path), digest=sources, compile_s=time.perf_counter() - start)
        note = Path(scratch) / facts.name
        note.write_text(json.dumps(asdict(kernel) | {"sha256": _sha256(target)}))
        for item in (target, note):
            with item.open("rb") as handle:
                os.fsync(handle.fileno())
        target.replace(path)
        note.replace(facts)
    return kernel


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
