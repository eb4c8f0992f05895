"""``docs/replay-schema.json`` is what the code says, and what reports and manifests obey."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvplugin.replay import CaptureReport, replay_capture, write_capture
from kvplugin.replay.capture.manifest import MANIFEST_NAME, Role
from kvplugin.replay.schema import schema
from kvplugin.replay.selftest.faults import FAULTS, MLA
from kvplugin.replay.selftest.synthetic import Shape, make_capture

DOCS = Path(__file__).parents[2] / "docs"


def test_the_schema_is_generated() -> None:
    assert (DOCS / "replay-schema.json").read_text() == schema()


def test_the_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / "replay.md").read_text(), re.DOTALL)
    finished = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=True, timeout=120)
    assert finished.stdout.splitlines() == ["True", "[[[0, 1, 2]]]", "False"]


def test_every_role_is_documented() -> None:
    page = (DOCS / "replay.md").read_text()
    assert [role for role in Role if f"`{role}`" not in page] == []


@pytest.mark.parametrize("shape", [MLA, Shape(world=2)], ids=["mla", "gqa"])
def test_reports_and_manifests_obey_it(shape: Shape, tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema comes with vLLM")
    schemas = json.loads(schema())
    capture = make_capture(shape)
    write_capture(capture, tmp_path)
    jsonschema.validate(json.loads((tmp_path / MANIFEST_NAME).read_text()), schemas["manifest"])
    report = replay_capture(capture)
    jsonschema.validate(json.loads(report.model_dump_json()), schemas["report"])


def test_a_report_survives_json() -> None:
    bad, other = FAULTS[-1].records()
    report = replay_capture(make_capture(Shape()).__class__("engine", "model", (bad, other)))
    assert CaptureReport.model_validate_json(report.model_dump_json()) == report
