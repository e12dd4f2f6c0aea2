"""Other load tools and this one against the same simulated engine, each next to what the engine really sent."""
