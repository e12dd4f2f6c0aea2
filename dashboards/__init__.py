"""Grafana dashboards built from specs, Prometheus' rules, and pictures of both without Grafana."""
