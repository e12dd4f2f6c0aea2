"""Engine steps: noted in the engine's process, logged, recorded on demand."""
