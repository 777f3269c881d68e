"""Trainers: the reference trainer (`grpo`), and one small adapter per framework."""
