"""Every exported metric, and how its collectors are made."""
