"""Proposers of drafts that vLLM imports by name, and what they decide."""
