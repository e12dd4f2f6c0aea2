"""The load lab: drives a running lab over HTTP, measures it at the client, and writes the report.

Only `bench`, `by_hand` and `locustfile` import Locust, which patches the interpreter, and `sweep` and
`crosscheck.ours` run on `bench`.
"""
