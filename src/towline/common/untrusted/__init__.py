"""What is written by others: killable workers that parse it, and regular expressions in linear time."""
