"""The JSON Schema of a rollout file: ``python -m kvplugin.requests.rollout_schema > docs/rollout-schema.json``."""

from __future__ import annotations

import json
from typing import Any

from kvplugin.requests.rollout import Rollout


def schema() -> dict[str, Any]:
    """As JSON Schema, draft 2020-12."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Rollout.model_json_schema()}


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
