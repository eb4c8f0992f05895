"""kvplugin inside a real engine: tiny checkpoints, a server runner, the demo. Repository only, not in the wheel."""
