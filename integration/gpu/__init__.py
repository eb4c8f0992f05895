"""The GPU check: kernels compiled, captured, raced and timed, once, on a machine with a GPU that has no vLLM."""
