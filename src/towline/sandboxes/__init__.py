"""Isolated places for untrusted programs: one interface, four runtimes, and a pool of warm sandboxes."""
