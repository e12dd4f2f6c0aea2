"""The `tandem` command."""

from serving.cli.verbs import main

__all__ = ["main"]
