"""Grafana's dashboards built from specs, pictures of them without Grafana, and Prometheus' rules."""
