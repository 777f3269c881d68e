"""Functions that parse what an agent wrote. They run in killable workers (`towline.common.untrusted.workers`) and import little."""
