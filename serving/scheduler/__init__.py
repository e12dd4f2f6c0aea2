"""The scheduling service: who runs, in which order, and where.

Decisions (`admission`, `queue`, `policy`, `ledger`, `core`) are pure; `service` and `client` hold all asyncio.
"""
