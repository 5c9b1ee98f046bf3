"""docs/experiments.md says what docs/experiments/*.csv say: the text is filled in from them and its claims are checked."""

import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, "tests/paper")
import report

DOCS, PROSE = Path("docs/experiments"), "tests/paper/experiments.md"


def test_the_text_is_that_of_the_numbers():
    assert Path("docs/experiments.md").read_text() == report.text(DOCS, PROSE)


def test_its_pictures_are_there():
    shown = re.findall(r"!\[.*?\]\((.*?)\)", Path("docs/experiments.md").read_text())
    assert len(shown) >= 5 and all((Path("docs") / path).exists() for path in shown)
    assert {Path(path).name for path in shown} == {path.name for path in DOCS.glob("*.png")}


@pytest.mark.parametrize("table, was, becomes", [
    ("reuse", ",rmm,8,charged,0.9", ",rmm,8,charged,0.1"),  # the claim of the task
    ("held", "facts between,0", "facts between,3"),
])  # fmt: skip
def test_prose_that_no_longer_holds_is_not_written(tmp_path, table, was, becomes):
    shutil.copytree(DOCS, tmp_path, dirs_exist_ok=True)
    numbers = (tmp_path / f"{table}.csv").read_text()
    assert was in numbers
    (tmp_path / f"{table}.csv").write_text(numbers.replace(was, becomes))
    with pytest.raises(SystemExit, match="no longer holds"):
        report.text(tmp_path, PROSE)


def test_marks_by_hand(tmp_path):
    (tmp_path / "reuse.csv").write_text("variant,spec,lag,pending,retained,half_width\n"
                                        ",h2o,,charged,0.9625,0.0139\n--flip 0.1,h2o,,charged,1,0\n,h2o,,free,0.5,0\n")  # fmt: skip
    t = report.Tables(tmp_path)
    assert report.fill(t, "reuse retained; spec=h2o") == ".963" and report.fill(t, "reuse retained±; spec=h2o") == ".963 ± .014"
    assert report.fill(t, "reuse retained:1; spec=h2o; variant=--flip 0.1") == "1.0"
    assert report.fill(t, "reuse retained%; spec=h2o; pending=free") == "50 %"
    with pytest.raises(SystemExit, match="0 rows of reuse"):
        report.fill(t, "reuse retained; spec=tova")
