"""One file a step, applied in order when the server starts."""
