"""Trains a learned draft (an EAGLE-3 head) for a small Llama-like model; run as ``python -m deploy.train_draft``."""
