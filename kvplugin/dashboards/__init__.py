"""What an operator looks at and is woken by: panels, recording rules and alerts, and the files made of them.

Nothing here imports an engine, and only ``grafana`` needs grafana-foundation-sdk.
"""
