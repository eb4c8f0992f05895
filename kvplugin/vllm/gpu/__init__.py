"""The plugin on vLLM's CUDA engines: its backends, the policy at the top-k stage, conversions shared in a group."""
