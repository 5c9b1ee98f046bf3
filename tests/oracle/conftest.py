"""Lets the tests import their neighbours and shares one set of traces."""
import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))

import policies_attention  # noqa: E402, F401 (makes its policies known)
import policies_keys  # noqa: E402, F401 (makes its policies known)
import policies_output  # noqa: E402, F401 (makes its policies known)
from make_traces import TRACES, write_all  # noqa: E402
from tracefile import read_trace  # noqa: E402


@pytest.fixture(scope="session")
def traces(tmp_path_factory):
    """name -> (path, what the oracle reads from it)"""
    folder = tmp_path_factory.mktemp("traces")
    write_all(folder)
    paths = {name: str(folder / (name + ".h5")) for name in TRACES}
    return {name: (path, read_trace(path)) for name, path in paths.items()}
