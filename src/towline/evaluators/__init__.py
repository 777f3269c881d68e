"""What a session is worth: evaluators, one small file each."""
