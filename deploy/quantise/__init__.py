"""A checkpoint in 8 bits, to measure beside its original."""
