"""Tasks from files: one loader a format, and the oracle that shows a task can be solved."""
