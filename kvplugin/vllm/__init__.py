"""The only folder that imports vLLM: registration, backends, builders, hooks; ``cpu/`` for the CPU engine."""
