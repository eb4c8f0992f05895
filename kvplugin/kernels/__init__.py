"""The GPU kernels seen without a GPU: what is compiled of each, what it needs, what it moves."""
