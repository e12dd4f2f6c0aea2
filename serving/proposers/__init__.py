"""Drafts of our own: who proposes them within vLLM, and what decides how many."""
