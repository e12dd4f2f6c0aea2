"""Shared nouns and definitions: no asyncio, and of others' packages msgspec alone."""
