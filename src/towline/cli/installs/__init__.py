"""Commands that get a machine ready for sessions: harness installs, images."""
