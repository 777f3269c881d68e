"""Files that are put into a verifier's sandbox and run by whatever Python is there; Towline itself imports none of them."""
