"""Benchmarks on the real code: gateway, server, sandboxes, pacing and builders. `bench/README.md` explains the figures."""
