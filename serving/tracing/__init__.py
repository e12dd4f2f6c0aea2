"""Engine steps and requests of a running lab: events, logs, recordings, spans, files."""
