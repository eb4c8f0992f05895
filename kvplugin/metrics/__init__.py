"""The policy's counters as Prometheus metrics, from the process that counts to the one that serves ``/metrics``.

Nothing is exported here, because ``directory`` runs in the first moments of every vLLM process and must stay light.
"""
