"""The demo: one session of a real agent program with a proof of its record, then training on many such sessions.

It creates the tiny model on first use. The model has had a format warm-up only: it writes well-formed calls and answers, but
does not know which are right.
"""
