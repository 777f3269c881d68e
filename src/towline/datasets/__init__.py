"""Sessions as offline data: which are kept, and how they are written for those who train on files."""
