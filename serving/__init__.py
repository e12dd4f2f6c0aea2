"""Tandem: a distributed serving lab for large language models."""

__version__ = "0.1.0"
