"""The OpenAI-compatible front door: admission and routing around bytes that pass through."""
