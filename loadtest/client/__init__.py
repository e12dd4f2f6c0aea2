"""One request on the wire, what a lab says of itself, and what this client can do at most."""
