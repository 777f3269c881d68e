"""Token fidelity: templates, parsing, the graph, continuation and training rows. Knows no HTTP."""
