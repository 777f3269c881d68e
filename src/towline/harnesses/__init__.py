"""Agent programs, unchanged: one small file each, and the installs that all sessions share."""
