"""Locust by hand: what each process sends, whose share is done, charts and metrics."""
