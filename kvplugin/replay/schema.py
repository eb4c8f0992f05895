"""The JSON schemas of the report and of a capture's manifest: ``python -m kvplugin.replay.schema``."""

from __future__ import annotations

import json

from kvplugin.replay.capture.manifest import Manifest
from kvplugin.replay.report import CaptureReport


def schema() -> str:
    """``docs/replay-schema.json``."""
    schemas = {
        "report": CaptureReport.model_json_schema(mode="serialization"),
        "manifest": Manifest.model_json_schema(mode="validation"),
    }
    return json.dumps(schemas, indent=1) + "\n"


if __name__ == "__main__":
    print(schema(), end="")
