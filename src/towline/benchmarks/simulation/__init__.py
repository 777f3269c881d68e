"""The server's scheduling on virtual time: many nodes, long-tailed sessions, and two ways of collection to compare with."""
