"""The plugin inside real vLLM engines, in one process where that is possible."""
