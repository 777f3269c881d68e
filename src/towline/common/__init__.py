"""Small helpers without a domain: arrays, exact JSON, files, locks, and what several packages would otherwise copy."""
