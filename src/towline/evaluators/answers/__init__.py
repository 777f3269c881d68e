"""Compares answers in mathematics and science: numbers, quantities, expressions, collections.

Nothing here evaluates code: a small grammar parses texts into trees of data, and only trees are computed with.
"""
