"""Proofs of our own tools: what a recording costs."""
