"""What the measured gateways are called: by `--peers`, and in the tables."""

from __future__ import annotations

DIRECT = "no-gateway"  # the client spreads its streams over the engines itself
OURS = "tandem"
OURS_TWICE = "tandem-2"  # with two gateways
ROUTER = "vllm-router"
SMG = "smg"
LITELLM = "litellm"
SERVE_PROXY = "serve-proxy"  # Ray Serve's own, before a plain streamer
PEERS = (DIRECT, OURS, OURS_TWICE, ROUTER, SMG, LITELLM, SERVE_PROXY)
