"""Functions that parse what an agent wrote. They run in killable workers, and import little."""
