"""A taskset of verifiers: the rows of a JSON file, which the environment variable ROWS names."""

import json
import os
from pathlib import Path

import verifiers.v1 as vf


class RowData(vf.TaskData):
    registry: str
    towline_task: dict | None = None


class RowTask(vf.Task[RowData]):
    pass


class Rows(vf.Taskset[RowTask, vf.TasksetConfig]):
    def load(self):
        for row in json.loads(Path(os.environ["ROWS"]).read_text()):
            yield RowTask(RowData(**row), self.config.task)


__all__ = ["Rows"]
