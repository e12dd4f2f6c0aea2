"""Shared nouns and definitions: no asyncio, no Ray, no vLLM, standard library only."""
