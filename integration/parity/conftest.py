from __future__ import annotations

from integration.parity.source_in_use import is_in_use

# `make parity` runs these tests, with another vLLM than the installed one.
collect_ignore_glob = [] if is_in_use() else ["test_*.py"]
