"""How good a model is at tasks with a harness: pass@k with intervals, and whether a change is more than chance."""
