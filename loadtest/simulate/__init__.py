"""`tandem simulate`: how many replicas of which lane hold an objective, in virtual time, by a profile."""
