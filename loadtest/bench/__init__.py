"""`tandem bench`: measures a running lab, stage by stage, with Locust as a library."""

# Locust patches the interpreter: it must come before whatever imports ssl or socket.
import locust  # noqa: F401
