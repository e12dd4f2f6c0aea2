"""A checkpoint with more attention heads that says the same, so that small models divide among cards."""
