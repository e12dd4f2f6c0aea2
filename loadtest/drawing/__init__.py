"""How charts look, and pages that need no network."""
