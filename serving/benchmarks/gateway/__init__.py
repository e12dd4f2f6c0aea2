"""`make bench-gateway`: our gateway's data path beside other gateways, in front of the same simulated engines."""
