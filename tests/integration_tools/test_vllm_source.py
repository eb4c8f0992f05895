"""Fetch vLLM's Python from a package index on this machine."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from package_index import COMPILED_BYTES, Index, make_wheel, serve_index
from typer.testing import CliRunner

from integration.vllm_source import Route, SourceError, __main__, default_folder, fetch_source

FILES = {
    "vllm/__init__.py": "print('vllm')\n",
    "vllm/config/__init__.py": "",
    "vllm/config/known.json": "{}",
    "vllm/static/page.js": "no Python",
}
KEPT = {
    *("vllm/__init__.py", "vllm/config/__init__.py", "vllm/config/known.json"),
    *(f"vllm-9.1.0.dist-info/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")),
}
RANGED_CLIENT = "python-httpx"


@pytest.fixture(autouse=True)
def pip_without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@contextmanager
def index_of(
    monkeypatch: pytest.MonkeyPatch, wheels: Mapping[str, bytes] | None = None, *, ranges: bool = True
) -> Iterator[Index]:
    """pip's index, with vLLM 9.1.0 if nothing else is named."""
    with serve_index({"9.1.0": make_wheel("9.1.0", FILES)} if wheels is None else wheels, ranges=ranges) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        yield index


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("ranges", "route"), [(True, Route.RANGES), (False, Route.WHOLE)])
def test_fetches_the_python_alone(ranges: bool, route: Route, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with index_of(monkeypatch, ranges=ranges) as index:
        source = fetch_source("9.1.0", tmp_path)
    assert (source.version, source.root, source.route) == ("9.1.0", tmp_path / "9.1.0", route)
    assert files_in(source.root) == KEPT
    assert (source.root / "vllm/__init__.py").read_text() == FILES["vllm/__init__.py"]
    assert (tmp_path / ".gitignore").read_text() == "*\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".gitignore", "9.1.0"], "nothing else is left"
    if ranges:
        assert 0 < index.sent_to(RANGED_CLIENT) < COMPILED_BYTES, "the compiled part stays where it is"


def test_a_kept_version_needs_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with index_of(monkeypatch):
        fetch_source("9.1.0", tmp_path)
    again = fetch_source("9.1.0", tmp_path)
    assert (again.root, again.route) == (tmp_path / "9.1.0", Route.CACHED)


@pytest.mark.parametrize(("asked", "found"), [("9.1.*", "9.1.2"), ("9.1", "9.1.0")])
def test_a_series_and_a_short_form(asked: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = {version: make_wheel(version, FILES) for version in ("9.1.0", "9.1.2", "9.2.0")}
    with index_of(monkeypatch, wheels):
        assert fetch_source(asked, tmp_path).version == found
        assert fetch_source(asked, tmp_path).route is Route.CACHED


def test_a_wheel_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm-9.1.0-py3-none-any.whl").write_bytes(make_wheel("9.1.0", FILES))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert files_in(fetch_source("9.1.0", tmp_path / "kept").root) == KEPT


@pytest.mark.parametrize("ranges", [True, False])
def test_a_wheel_that_differs_from_its_record_is_not_kept(
    ranges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel("9.1.0", FILES, false_record=True)
    with (
        index_of(monkeypatch, {"9.1.0": wheel}, ranges=ranges),
        pytest.raises(SourceError, match=r"vllm/__init__\.py is not what RECORD says"),
    ):
        fetch_source("9.1.0", tmp_path)
    assert not (tmp_path / "9.1.0").exists()


def _edit(root: Path) -> str:
    (root / "vllm/__init__.py").write_text("print('mine')")
    return "vllm/__init__.py is not what RECORD says"


def _remove(root: Path) -> str:
    (root / "vllm/config/known.json").unlink()
    return "vllm/config/known.json is missing"


def _add(root: Path) -> str:
    (root / "vllm/extra.py").touch()
    return "vllm/extra.py is not in RECORD"


def _lose_record(root: Path) -> str:
    shutil.rmtree(root / "vllm-9.1.0.dist-info")
    return "RECORD is missing"


@pytest.mark.parametrize("damage", [_edit, _remove, _add, _lose_record])
def test_a_kept_version_that_was_changed_is_refused(
    damage: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with index_of(monkeypatch):
        root = fetch_source("9.1.0", tmp_path).root
    assert callable(damage)
    found = damage(root)
    with pytest.raises(SourceError) as error:
        fetch_source("9.1.0", tmp_path)
    assert str(error.value) == f"vLLM 9.1.0: {found} in {root}; remove that folder and fetch again"


def test_another_process_may_be_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with index_of(monkeypatch):
        fetch_source("9.1.0", tmp_path / "first")
        rename = Path.rename

        def late(self: Path, target: Path) -> Path:
            shutil.copytree(tmp_path / "first/9.1.0", target)
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", late)
        assert fetch_source("9.1.0", tmp_path / "second").route is Route.CACHED
    assert sorted(path.name for path in (tmp_path / "second").iterdir()) == [".gitignore", "9.1.0"]


def test_refuses_an_unknown_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with index_of(monkeypatch), pytest.raises(SourceError) as error:
        fetch_source("9.7.0", tmp_path)
    assert str(error.value) == "vLLM 9.7.0: the package index has no such version; the newest it has are 9.1.0"


def test_refuses_a_cpu_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = {"9.1.0+cpu": make_wheel("9.1.0+cpu", FILES)}
    with index_of(monkeypatch, wheels), pytest.raises(SourceError, match=r"prefers the CPU build 9\.1\.0\+cpu"):
        fetch_source("9.1.0", tmp_path)


def test_says_so_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(SourceError, match="pip finds no vLLM at all; check the network, and the index with 'pip conf"):
        fetch_source("9.1.0", tmp_path)


@pytest.mark.parametrize("version", ["", "latest", "-r list.txt", "9.1.0 --index-url=x", "*", "../9"])
def test_refuses_what_is_no_version(version: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="not a version; give one such as"):
        fetch_source(version, tmp_path)


def test_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(SourceError("9.1.0", "found", "cure")))
    assert (str(error), error.version) == ("vLLM 9.1.0: found; cure", "9.1.0")


def test_folder_can_be_moved_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPLUGIN_VLLM_SOURCE", raising=False)
    assert default_folder() == Path(__file__).resolve().parents[2] / ".cache/vllm-source"
    monkeypatch.setenv("KVPLUGIN_VLLM_SOURCE", str(tmp_path))
    assert default_folder() == tmp_path


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = {version: make_wheel(version, FILES) for version in ("9.1.0", "9.2.0")}
    with index_of(monkeypatch, wheels):
        found = CliRunner().invoke(__main__.app, ["9.1.0", "9.2.*", "9.9.9", "--dest", str(tmp_path)])
    assert found.exit_code == 1, found.output
    assert found.stdout == f"9.1.0 {tmp_path / '9.1.0'} (ranges)\n9.2.0 {tmp_path / '9.2.0'} (ranges)\n"
    assert found.stderr.startswith("error: vLLM 9.9.9: the package index has no such version; ")
