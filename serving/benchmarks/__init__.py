"""How fast the scheduler decides: pure code and running service."""
