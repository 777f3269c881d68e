"""Many sessions on this machine, and what is made of them: runs, datasets and evaluation reports."""
