"""Places to run what is not trusted: one interface, four runtimes, and a pool of warm ones."""
