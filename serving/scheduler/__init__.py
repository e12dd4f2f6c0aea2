"""The scheduling service: who runs, in which order, and where.

Decisions are pure: all asyncio is in the service around them and in the client of it.
"""
