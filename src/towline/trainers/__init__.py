"""Trainers: a reference one in plain torch, and a small adapter for each of the frameworks."""
