"""Simulated labs in virtual time: the scheduler's own core over simulated replicas. No asyncio, no Ray, no vLLM."""
