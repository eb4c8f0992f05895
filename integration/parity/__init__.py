"""kvplugin beside vLLM's own GPU code, run for real in Triton's interpreter from the Python of vLLM's CUDA wheel."""
