"""Sampled text to replies: the output formats of model families. `registry` is the entry point."""
