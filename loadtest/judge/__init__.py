"""Estimates with their intervals, objectives, and the search for capacity."""
