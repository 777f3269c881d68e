"""Node hosts by `srun`: the places that a file of nodes gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from towline.cluster.slurm_hosts import slurm_places
from towline.errors import ConfigError


def test_a_place_per_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_HET_SIZE", raising=False)
    nodes = tmp_path / "nodes"
    nodes.write_text("n1 10.0.0.1\nn2 10.0.0.2\n")
    first, second = slurm_places(nodes, tmp_path / "data")
    assert (first.name, first.data, first.listen) == ("n1", tmp_path / "data/nodes/n1", "10.0.0.1:0")
    assert (second.launcher[0], second.launcher[3]) == ("srun", "--nodelist=n2")
    assert "--het-group=0" not in second.launcher
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    assert "--het-group=0" in slurm_places(nodes, tmp_path)[0].launcher


def test_what_is_wrong_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = tmp_path / "nodes"
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match="not inside a Slurm job"):
        slurm_places(nodes, tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(ConfigError, match="No such file"):
        slurm_places(nodes, tmp_path)
    for text in ("", "n1\n", "n1 10.0.0.1 more\n"):
        nodes.write_text(text)
        with pytest.raises(ConfigError, match="each line must be NODE ADDRESS"):
            slurm_places(nodes, tmp_path)
