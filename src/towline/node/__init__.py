"""Runs sessions through their stages on one machine."""
