"""Answers of mathematics and science: found in a text, read as numbers, quantities or expressions, and compared.

Nothing here evaluates code: texts are read by a small grammar into trees of data, and only trees are computed with.
"""
