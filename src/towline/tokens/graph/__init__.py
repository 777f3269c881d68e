"""The session's graph of turns: fingerprints, matching, lineage and roles."""
