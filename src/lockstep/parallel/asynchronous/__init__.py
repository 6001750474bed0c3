"""Asynchronous data parallelism: ranks that train by themselves for a while, or with updates that come late.

Nothing is imported here, because the front of the library is reached without these.
"""
