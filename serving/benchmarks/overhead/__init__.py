"""`make bench-overhead`: what the gateway costs on top of a real engine."""
