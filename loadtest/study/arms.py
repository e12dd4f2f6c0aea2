"""The arms of the study: how requests are decoded, and who decides it."""

from __future__ import annotations

BATCHED = "only-batched"
SPECULATIVE = "only-speculative"
TABLE = "table"
PLUG_IN = "plug-in"
PLACEMENT = "adaptive placement"

# In the order of tables and pictures, each with what it is.
ARMS = {
    BATCHED: "every request without drafts",
    SPECULATIVE: "every request with k drafts a step",
    TABLE: "k by the sequences that run, the same for all of them",
    PLUG_IN: "k for each sequence, by what its own drafts gave and by how many run",
    PLACEMENT: "a lane without drafts and one with a table; the scheduler chooses for each request",
}
FIXED = (BATCHED, SPECULATIVE)
