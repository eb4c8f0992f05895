"""The parts that vLLM's CPU build lacks to serve DeepSeek sparse attention."""
