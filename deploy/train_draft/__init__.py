"""Training of a learned draft (an EAGLE-3 head) for a small model; see docs/learned-draft.md."""
