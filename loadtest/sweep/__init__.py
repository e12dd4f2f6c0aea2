"""`tandem sweep`: finds the highest rate at which each lane keeps an objective."""
