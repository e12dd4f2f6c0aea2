"""Engines behind one HTTP interface: vLLM's own OpenAI application, and a simulated one for tests."""
