"""Charts, tables and sentences of a run, and of two."""
