"""What the documents show: commands with their output, programs, links and headings.

A fenced block with the language `console` is run, `$` line by `$` line; what it prints is compared. One with the language
`python` is run too, or written to a file where its first line says so (`# name.py: ...`, in C `/* name.c: ...`), for a later command to run.
"""
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KVLAG = os.path.abspath(os.environ.get("KVLAG", "./kvlag"))
DOCUMENTS = sorted(str(p.relative_to(ROOT)) for pattern in ("README.md", "docs/*.md", "docs/*/*.md", "traces/*.md")
                   for p in ROOT.glob(pattern))  # fmt: skip
OWN = {"out", "build", "kvlag"}  # what commands write to, or what is under test: not the checkout's
PROGRAMS = re.compile(r"(kvlag|make|mpirun|sbatch|bash|sh|git|pip3?|python3?|gcc|cc|man|\S*/(kvlag|python|\S+\.(sh|py)))$")


def text(document):
    return (ROOT / document).read_text()


def blocks(document):
    """(language, content) of the fenced blocks, and ('', content) of the indented ones."""
    fence, indented = None, []
    for line in text(document).splitlines() + ["end"]:
        if mark := re.match(r"\s*```(\w*)\s*$", line):
            if indented:
                yield "", "\n".join(indented)
                indented = []
            if fence is None:
                fence = (mark[1], [])
            else:
                yield fence[0], "\n".join(fence[1])
                fence = None
        elif fence:
            fence[1].append(line)
        elif re.match(r" {4}\S", line):
            indented.append(line[4:])
        elif line.strip() and indented:
            yield "", "\n".join(indented)
            indented = []


def file_of(language, block):
    """The file that a block of a program is, where its first line says so."""
    marks = {"python": r"# (\S+\.py)\b", "c": r"/\* (\S+\.c)\b"}
    name = re.match(marks[language], block) if language in marks else None
    return name and name[1]


def commands(block):
    """(command, output lines) pairs of a console block; a command goes on where a line ends with a backslash."""
    for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
        command, *output = re.sub(r"\\\n\s*", "", part).splitlines()
        yield command, [line for line in output if line.strip()]


def not_run(document):
    """The commands that stand in blocks that are not run, without comments and prompts."""
    for language, block in blocks(document):
        for line in re.sub(r"\\\n\s*", "", block).splitlines() if language in ("", "sh") else []:
            line = re.sub(r"\s+#.*", "", line.strip().removeprefix("$ ")).strip()
            words = [word for word in line.split() if "=" not in word]
            if words and (language == "sh" or PROGRAMS.match(words[0])) and not line.startswith("#"):
                yield line


def masked(line):
    """Numbers, hashes and runs of blanks differ between runs and machines; words do not."""
    return re.sub(r"\s+", " ", re.sub(r"\b[0-9a-f]{16,32}\b|[0-9]+(\.[0-9]+)?", "#", line)).strip()


def checkout(folder):
    """Make `folder` look like the root after `make`, with the kvlag under test and an empty out/."""
    for path in ROOT.iterdir():
        if path.name not in OWN and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    (folder / "kvlag").symlink_to(KVLAG)
    (folder / ".venv").symlink_to(sys.prefix)
    for name in "out", "build":
        (folder / name).mkdir()
    subprocess.run(["make", "-s", "build/tiny.gguf"], cwd=folder, check=True)


def run(document, folder):
    """Run all that the document shows, in its order, in `folder`. Returns the number of commands."""
    count = 0
    for language, block in blocks(document):
        if name := file_of(language, block):
            (folder / name).write_text(block + "\n")
        elif language == "python":
            expect(f"{document}: python\n{block}", [sys.executable, "-c", block], [], folder)
        for command, output in commands(block) if language == "console" else []:
            count += 1
            expect(f"{document}: {command}", ["bash", "-c", command], output, folder)
    return count


def expect(what, argv, output, folder):
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{what}\n{done.stdout}{done.stderr}"
    lines = [masked(line) for line in (done.stdout + done.stderr).splitlines()]
    for line in output:
        assert masked(line) in lines, f"{what}\nno longer prints: {line}\nbut:\n" + done.stdout + done.stderr


def prose(document):
    """The text without code."""
    lines, inside = [], False
    for line in text(document).splitlines():
        if re.match(r"\s*```", line):
            inside = not inside
        elif not inside:
            lines.append(line)
    return re.sub(r"`[^`]*`", "``", "\n".join(lines))


def anchors(document):
    """The names by which headings can be linked to, as GitHub makes them."""
    names, inside = [], False
    for line in text(document).splitlines():
        if re.match(r"\s*```", line):
            inside = not inside
        elif not inside and (heading := re.match(r"#{1,6}\s+(.*)", line)):
            name = re.sub(r"[^\w\- ]", "", heading[1].strip().lower()).replace(" ", "-")
            names.append(name + (f"-{names.count(name)}" if name in names else ""))
    return set(names)


def links(document):
    """(target, anchor) of the links and pictures that stay inside the repository; the target is a path from the root."""
    folder = (ROOT / document).parent
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if not re.match(r"\w+:", link):
            path, _, anchor = link.partition("#")
            target = (folder / path).resolve() if path else ROOT / document
            yield link, target, anchor
