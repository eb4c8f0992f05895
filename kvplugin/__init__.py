"""kvplugin: a topology policy for models with DeepSeek sparse attention, as an out-of-tree vLLM plugin."""

__version__ = "0.1.0"
