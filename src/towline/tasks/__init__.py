"""Loads tasks from files: one loader per format, and the oracle, which proves that a task can be solved."""
