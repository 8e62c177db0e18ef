"""Room perf/facts/provenance.py: what a process says of the code it has imported."""

from pathlib import Path

import torch

import strategies
from perf.facts.provenance import digest, imported
from tests.factory import write_text


def test_folders_are_those_of_the_packages_links_followed():
    said = imported()
    assert said.strategies == str(Path(strategies.__file__).resolve().parent)
    assert said.torch == str(Path(torch.__file__).resolve().parent)
    assert said.digest == digest(Path(said.strategies))


def test_digest_is_of_names_and_contents_of_python_files(tmp_path):
    write_text(tmp_path / "a" / "one.py", "1")
    write_text(tmp_path / "b" / "one.py", "1")
    write_text(tmp_path / "b" / "__pycache__" / "one.pyc", "9")
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    write_text(tmp_path / "b" / "one.py", "2")
    assert digest(tmp_path / "a") != digest(tmp_path / "b")
    (tmp_path / "b" / "one.py").unlink()
    write_text(tmp_path / "b" / "two.py", "1")
    assert digest(tmp_path / "a") != digest(tmp_path / "b"), "a file of another name is another module"
