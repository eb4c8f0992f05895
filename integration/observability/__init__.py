"""The operator's view on a real server: Prometheus, Alertmanager, a browser."""
