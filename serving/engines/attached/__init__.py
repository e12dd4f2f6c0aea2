"""Servers that somebody else runs: asked what they can do, watched, and offered to the scheduler."""
