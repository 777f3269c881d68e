"""llama.cpp as an engine: GGUF files, in process, on whatever the machine has.

`gguf.py` reads a file's metadata, `vocabulary.py` makes of it a model folder that a codec can be loaded from,
`engine.py` samples, `slots.py` keeps conversations where their prefix is cached, `smollm2.py` finds the model that comes
from PyPI.
"""

from towline.engines.llamacpp.engine import LlamaCppEngine
from towline.engines.llamacpp.gguf import Gguf
from towline.engines.llamacpp.vocabulary import model_folder

__all__ = ["Gguf", "LlamaCppEngine", "model_folder"]
