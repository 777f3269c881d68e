"""What the gateway costs, measured on its real code with real tokenizers: `continuing` (one turn) and `load` (many)."""
