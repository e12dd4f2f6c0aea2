"""The `tandem` command."""

from serving.cli.commands import main

__all__ = ["main"]
