"""Prometheus metrics of each process, registered from `serving.core.metric_names`."""
