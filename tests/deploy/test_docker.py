"""The image's recipe: what it copies is there, nothing is compiled, and nobody is root. No container engine needed."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RECIPE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
IGNORE = (ROOT / "deploy" / "docker" / "Dockerfile.dockerignore").read_text().split()


def test_what_is_copied_is_there_and_not_ignored() -> None:
    sources = [
        source
        for arguments in re.findall(r"^COPY (?!--)(.*)$", RECIPE, re.MULTILINE)
        for source in arguments.split()[:-1]
    ]
    assert "kvplugin" in sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in IGNORE, source


def test_the_last_user_is_not_root() -> None:
    users = re.findall(r"^USER (\d+)", RECIPE, re.MULTILINE)
    assert users
    assert int(users[-1]) > 0


def test_nothing_is_compiled() -> None:
    assert not re.search(r"apt-get|gcc|g\+\+|nvcc|build-essential", RECIPE)


def test_the_wheel_is_pure_python_and_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    copied = tmp_path / "source"
    copied.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (copied / name).write_bytes((ROOT / name).read_bytes())
    for path in (ROOT / "kvplugin").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            target = copied / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    subprocess.run([*command, str(tmp_path), str(copied)], check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    data = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "kvplugin").rglob("*")
        if path.suffix in {".j2", ".typed"} and "__pycache__" not in path.parts
    }
    assert data
    assert data <= packed, data - packed
