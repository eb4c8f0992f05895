"""vLLM's Python files as its CUDA wheel ships them: what to compare with, on a machine that cannot run the wheel.

The wheel holds 300 MB of compiled code and 10 MB of Python. Only the Python is fetched, so the result imports but runs
no CUDA.
"""

from integration.vllm_source.errors import SourceError
from integration.vllm_source.source import DEFAULT_VERSION, Route, VllmSource, default_folder, fetch_source

__all__ = ["DEFAULT_VERSION", "Route", "SourceError", "VllmSource", "default_folder", "fetch_source"]
