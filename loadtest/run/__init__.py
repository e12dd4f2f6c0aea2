"""A run's plan, its stages and its files. Nothing here imports Locust."""
