"""The load lab: drives a running lab over HTTP, measures it at the client, and writes the report.

Only `locustfile` and `bench` import Locust, which patches the interpreter.
"""
