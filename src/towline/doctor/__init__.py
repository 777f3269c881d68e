"""What works here and what does not, found by trying it, with what to do about it."""
