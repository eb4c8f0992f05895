"""The quick start's shell blocks, made to run beside anything else: own folder, own ports."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "quick-start.md"
PROGRAMS = re.compile(r"^(vllm serve|prometheus-alertmanager|prometheus) ", re.MULTILINE)
"""What blocks that stay in the foreground begin their last line with."""
PATIENCE_S = 300


@dataclass(frozen=True)
class QuickStart:
    """The page, with some of its text replaced: folders and ports of one run.

    Attributes:
        replaced: what the page says, and what to say instead.
    """

    replaced: Mapping[str, str]

    def commands(self, section: str) -> list[str]:
        """The blocks of a section that end by themselves."""
        return [block for block in self._blocks(section) if not PROGRAMS.search(block)]

    def service(self, program: str) -> tuple[dict[str, str], list[str]]:
        """Exported variables, and the arguments after ``program``, of the block that starts it."""
        (block,) = [block for block in self._blocks() if program in PROGRAMS.findall(block)]
        variables: dict[str, str] = {}
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            if words[0] == "export":
                variables |= dict(word.split("=", 1) for word in words[1:])
        return variables, words[len(program.split()) :]

    def run(self, section: str) -> str:
        """Run a section's blocks as a reader would, in the repository's root; what they print."""
        return "".join(run(command) for command in self.commands(section))

    def _blocks(self, section: str = "") -> list[str]:
        text = PAGE.read_text()
        if section:
            text = re.split(rf"^## {section}$", text, flags=re.MULTILINE)[1].split("\n## ")[0]
        blocks: list[str] = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        for written, used in self.replaced.items():
            blocks = [block.replace(written, used) for block in blocks]
        return blocks


def run(command: str) -> str:
    """Run a command as a reader would, in the repository's root; what it prints."""
    environment = os.environ | {"no_proxy": "127.0.0.1", "COLUMNS": "160"}
    # Also where the tests run in another environment than the page's .venv.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    found = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert found.returncode == 0, f"{command}\n{found.stdout}\n{found.stderr}"
    return found.stdout
