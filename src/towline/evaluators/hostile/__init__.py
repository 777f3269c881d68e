"""Functions that parse what an agent wrote. They run in killable workers (`towline.common.workers`) and import little."""
