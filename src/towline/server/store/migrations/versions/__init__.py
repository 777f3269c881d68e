"""One file per step, applied in order when the server starts."""
