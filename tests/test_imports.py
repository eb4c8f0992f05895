"""The library part stands without vLLM."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvplugin

PACKAGE = Path(kvplugin.__file__).parent
ENGINE = PACKAGE / "vllm"
LIBRARY_FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if ENGINE not in path.parents]


def imported_modules(source: str) -> Iterator[str]:
    """Absolute names of the modules that a file imports anywhere, function bodies included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def imports_vllm(source: str) -> bool:
    return any(name.split(".")[0] == "vllm" for name in imported_modules(source))


@pytest.mark.parametrize("path", LIBRARY_FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_engine_folder_imports_vllm(path: Path) -> None:
    assert not imports_vllm(path.read_text())


def test_the_check_sees_an_import() -> None:
    assert imports_vllm("def f():\n    from vllm.config import VllmConfig\n")
    assert not imports_vllm("from kvplugin.vllm import plugin\nfrom .vllm import plugin\n")
    assert any(imports_vllm(path.read_text()) for path in ENGINE.rglob("*.py"))


@pytest.mark.parametrize("module", ["kvplugin", "kvplugin.config", "kvplugin.topology"])
def test_importing_the_library_loads_no_vllm(module: str) -> None:
    """In a fresh process, where the other tests have loaded nothing."""
    code = f"import sys, {module}; print(*[name for name in sys.modules if name.split('.')[0] == 'vllm'])"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert finished.stdout.split() == []
