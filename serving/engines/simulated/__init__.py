"""An engine with known times, for tests and policy studies only."""
