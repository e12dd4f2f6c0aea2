"""From records to a summary, and from two summaries to a comparison."""
