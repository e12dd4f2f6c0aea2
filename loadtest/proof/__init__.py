"""Proofs of our own tools: how many streams the client holds, and what a recording costs."""
