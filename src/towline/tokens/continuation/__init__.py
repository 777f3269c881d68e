"""Where a request continues: the deepest turn it provably continues, and the prompt made from that turn's tokens."""
