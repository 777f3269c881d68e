"""`towline serve` and the node hosts that it starts."""
