"""kvplugin's GPU parts in several versions of vLLM: contract tests and parity, run on the Python of its CUDA wheels."""
