"""llama.cpp as an engine: GGUF files, in process, on any machine.

`gguf.py` reads a GGUF file and makes a model folder from it that a codec can be loaded from, `server.py` starts and ends
llama.cpp's server and assigns its slots, `engine.py` samples.
"""

from towline.engines.llamacpp.engine import LlamaCppEngine
from towline.engines.llamacpp.gguf import GgufFile, find_smollm2, model_folder

__all__ = ["GgufFile", "LlamaCppEngine", "find_smollm2", "model_folder"]
