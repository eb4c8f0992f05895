"""The documents say what the code does: tables generated or compared, examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kvplugin import config_page
from kvplugin.config import load_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_configuration_page_is_generated() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == config_page.page()


def test_readme_keys_exist_with_their_defaults() -> None:
    section = README.split("## Configuration")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([a-z_.]+)` \| (`[^|]+`) \|", section, re.MULTILINE)
    known = {key: values.partition(",")[0] if "[" not in values else values for key, values, _ in config_page.rows()}
    assert len(rows) >= 8
    assert {key: known.get(key) for key, _ in rows} == dict(rows)


def test_readme_commands_are_make_targets_or_the_serving_line() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [line for block in blocks("bash") for line in block.strip().splitlines()]
    for command in commands:
        program, *arguments = command.split()
        assert program in ("make", "vllm"), command
        if program == "make":
            assert arguments[0] in targets, command
    (serving,) = [command for command in commands if command.startswith("vllm")]
    key, _, value = serving.partition("--additional-config.kvplugin.")[2].partition("=")
    section, name = key.split(".")
    assert load_config({section: {name: value}}).policy.mode == value


def test_readme_library_example_runs() -> None:
    (example,) = blocks("python")
    check = "\nassert all(set(range(4)) <= set(row) for row in topk.tolist()) and counters.sum() > 0\n"
    subprocess.run([sys.executable, "-c", example + check], check=True)


def test_relative_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
