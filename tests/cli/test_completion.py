"""Completion: what `kvlag completion --line` offers, and that bash, zsh and fish do with it what a user expects."""

import os
import pty
import re
import select
import shutil
import subprocess
import time

import pytest

from simcli import KVLAG, ROOT, kvlag


def offered(line):
    done = kvlag("completion", "--line", line)
    assert (done.returncode, done.stderr) == (0, b""), line
    lines = done.stdout.decode().splitlines()
    if lines:
        assert lines[0].startswith(":word\t"), line
    return [x.split("\t")[0] for x in lines[1:]]


# ---- candidates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line, words", [
    ("kvlag si", ["sim"]), ("kvlag --v", ["--version"]), ("kvlag nonsense ", []), ("kvlag", []), ("", []),
    ("kvlag help spe", ["spec"]), ("kvlag man ana", ["analyze"]), ("kvlag completion ", ["bash", "zsh", "fish"]),
    ("kvlag sim ", [":files"]), ("kvlag sim t.h5 ", [":files"]), ("kvlag sim -o ", [":files"]),
    ("kvlag sim --lifetimes=", [":files"]), ("kvlag sim --unit ", ["head", "layer", "model"]),
    ("kvlag sim --unit=l", ["--unit=layer"]), ("kvlag sim --seed ", []), ("kvlag sim --pend", ["--pending", "--pending-bits"]),
    ("kvlag sim --pending both --pend", ["--pending-bits"]), ("kvlag sim -b 1 --bu", []), ("kvlag sim -p rmm --pol", ["--policy"]),
    ("kvlag sim -- --uni", [":files"]), ("kvlag sim --schedule w", ["watermark:"]),
    ("kvlag sim --metrics lost_mass,out", ["lost_mass,out_err", "lost_mass,out_err=exact"]),
    ("kvlag make-trace ", ["random", "reuse"]), ("kvlag make-trace random --sequ", []), ("kvlag make-trace reuse --sequ", ["--sequences"]),
    ("kvlag policies tova", ["tova", "tova-kvpress"]), ("kvlag policies ad", ["ada"]), ("kvlag sim 'a\nb", []),
    ("kvlag trace --gradients f", ["fisher:"]),
])  # fmt: skip
def test_options_and_operands(line, words):
    assert offered(line) == words


@pytest.mark.parametrize("spec, ends", [
    ("tova", ["tova", "tova-kvpress", "tova("]), ("rmm(la", ["rmm(lag="]), ("rmm(lag=8,sig", ["rmm(lag=8,signal="]),
    ("rmm(lag=8,la", []), ("rmm(signal=uniform|corr", ["rmm(signal=uniform|correct"]), ("oracle(m", ["oracle(mass"]),
    ("oracle(mass,hor", ["oracle(mass,horizon="]), ("oracle(mass,horizon=", ["oracle(mass,horizon=inf", "oracle(mass,horizon=lag", "oracle(mass,horizon=budget/2"]),
    ("h2o(hold=", ["h2o(hold=lag", "h2o(hold=budget/2"]), ("h2o(recent=b", ["h2o(recent=budget/2"]), ("h2o(lag=", ["h2o(lag=budget/2"]),
    ("lfu(tau=", ["lfu(tau=1/resident"]), ("ada(tova-k", ["ada(tova-kvpress"]), ("ada(h2o,f", ["ada(h2o,floor="]),
    ("lag(8,ada(h2o(sin", ["lag(8,ada(h2o(sinks="]), ("ada(h2o(hold=2),fl", ["ada(h2o(hold=2),floor="]),
    ("h2o(prompt=snapkv(kern", ["h2o(prompt=snapkv(kernel="]), ("mix(memory=re", ["mix(memory=recent:"]),
    ("mix(evidence=attn*c", ["mix(evidence=attn*correct", "mix(evidence=attn*confidence"]), ("h2o(unit=", ["h2o(unit=head", "h2o(unit=layer", "h2o(unit=model"]),
    ("h2o(schedule=b", ["h2o(schedule=block:"]), ("h2o)", []), ("nobody(", []), ("((((((((((((((((((((", []),
])  # fmt: skip
def test_specs(spec, ends):
    assert sorted(offered(f"kvlag sim -p '{spec}")) == sorted(ends)
    assert sorted(offered(f"kvlag sim --policy=\"{spec}")) == sorted("--policy=" + x for x in ends)


@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")
def test_policies_of_a_plugin_that_the_line_names(tmp_path):
    so = tmp_path / "faulty.so"
    subprocess.run(["gcc", "-std=c17", "-D_GNU_SOURCE", "-DFAULT=0", "-shared", "-fPIC", f"-I{ROOT}",
                    ROOT / "tests/packages/faulty.c", "-o", so], check=True)  # fmt: skip
    assert offered("kvlag sim -p fau") == []
    for option in f"--plugin {so}", f"--plugin={so}", f"--plugin '{so}'":
        assert offered(f"kvlag sim {option} -p fau") == ["faulty"]
        assert offered(f"kvlag sim {option} -p 'ada(faulty(x") == ["ada(faulty(x="]
        assert offered(f"kvlag policies {option} fau") == ["faulty"]
    assert offered(f"kvlag sim --plugin {so}.none -p fau") == []


def test_every_command_and_option_is_offered():
    for command in offered("kvlag "):
        if command.startswith("-"):
            continue
        page = kvlag("help", command).stdout.decode()
        if "make-trace" == command:
            continue
        options = set(re.findall(r"^ {2,6}(?:-., )?(--[a-z-]+)", page.split("\nExamples:")[0], re.M))
        assert set(offered(f"kvlag {command} --")) == options | {"--help"}, command


def test_every_word_that_is_offered_for_a_parameter_is_one(sim_traces):
    """Whatever follows KEY= in any policy is accepted by sim's parser, at worst refused for what the trace lacks."""
    keys = {x for policy in ("mix(evidence=attn,memory=sum,", "rmm(", "snapkv(", "oracle(mass,") for x in offered(f"kvlag sim -p '{policy}")
            if x.endswith("=")}  # fmt: skip
    tried = 0
    for key in sorted(keys):
        for word in offered(f"kvlag sim -p '{key}"):
            value = word + {":": "1", "(": ""}.get(word[-1], "")
            if word[-1] == "(" or "prompt=" in word and "none" not in word:
                continue
            done = kvlag("sim", sim_traces / "short.h5", "-o", "/dev/null/x.csv", "-b", 20, "-L", 4, "-p", value + ")")
            assert b"not one of" not in done.stderr and b"unknown" not in done.stderr, (value, done.stderr)
            assert b"not a" not in done.stderr.replace(b"Not a dir", b""), (value, done.stderr)
            tried += 1
    assert tried > 60


# ---- shells ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path):
    """A folder with kvlag on the path, and a file to complete."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/kvlag").symlink_to(KVLAG)
    (tmp_path / "some-trace.h5").touch()
    for shell in "bash", "zsh", "fish":
        (tmp_path / f"kvlag.{shell}").write_bytes(kvlag("completion", shell).stdout)
    return tmp_path


def environment(home):
    return {"PATH": f"{home}/bin:{os.environ['PATH']}", "HOME": str(home), "TERM": "dumb", "LC_ALL": "C.UTF-8"}


class Shell:
    """An interactive shell on a pseudo-terminal, in which Ctrl-O prints the line that was typed, between < and >."""

    def __init__(self, home, argv, setup):
        pid, self.fd = pty.fork()
        if pid == 0:
            os.chdir(home)
            os.execvpe(argv[0], argv, environment(home))
        self.pid = pid
        self.type(setup + "\necho rea''dy\n")
        self.until(b"ready")

    def type(self, text):
        os.write(self.fd, text.encode())

    def until(self, pattern):
        seen, end = b"", time.monotonic() + 30
        while not re.search(pattern, seen):
            assert time.monotonic() < end, seen
            if select.select([self.fd], [], [], 0.5)[0]:
                seen += os.read(self.fd, 65536)
        return re.search(pattern, seen)

    def completed(self, line):
        self.type("\x15" + line + "\t\x0f")
        return self.until(rb"<<([^\r\n]*)>>")[1].decode()

    def close(self):
        os.close(self.fd)
        os.waitpid(self.pid, 0)


# Typed, and what the line is after a TAB.
TYPED = {
    "kvlag polic": "kvlag policies ",
    "kvlag sim --unit=l": "kvlag sim --unit=layer ",
    "kvlag sim --unit mod": "kvlag sim --unit model ",
    "kvlag sim -p 'rmm(la": "kvlag sim -p 'rmm(lag=",
    "kvlag sim -p 'lag(8,h2o(sin": "kvlag sim -p 'lag(8,h2o(sinks=",
    "kvlag sim -p 'h2o(hold=budg": "kvlag sim -p 'h2o(hold=budget/2' ",
    "kvlag sim -p h2o-o": "kvlag sim -p h2o-openvino ",
    "kvlag sim --schedule wat": "kvlag sim --schedule watermark:",
    "kvlag sim some": "kvlag sim some-trace.h5 ",
    "kvlag sim --lifetimes=some": "kvlag sim --lifetimes=some-trace.h5 ",
    "kvlag sim some-trace.h5 -o some": "kvlag sim some-trace.h5 -o some-trace.h5 ",
    "kvlag sim --seed so": "kvlag sim --seed so",
    "~/bin/kvlag polic": "~/bin/kvlag policies ",
}


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_at_a_terminal(home):
    setup = "unset HISTFILE; PS1='$ '; source kvlag.bash; bind 'set bell-style none'; " \
            "show() { echo \"<<$READLINE_LINE>>\"; }; bind -x '\"\\C-o\": show'"  # fmt: skip
    shell = Shell(home, ["bash", "--norc", "--noprofile", "-i"], setup)
    for typed, line in TYPED.items():
        assert shell.completed(typed) == line
    assert shell.completed("kvlag sim -p rmm\\(la") == "kvlag sim -p rmm\\(lag="
    shell.close()


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_zsh_at_a_terminal(home):
    setup = "unset HISTFILE; PS1='$ '; autoload -Uz compinit; compinit -u -d $HOME/dump; source kvlag.zsh; setopt nobeep; " \
            "show() { print -r -- \"<<$BUFFER>>\" }; zle -N show; bindkey '^O' show"  # fmt: skip
    shell = Shell(home, ["zsh", "-f", "-i"], setup)
    for typed, line in TYPED.items():
        assert shell.completed(typed) == line
    shell.close()


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish(home):
    def candidates(line):
        done = subprocess.run(["fish", "--no-config", "-c", "source kvlag.fish; complete -C $argv[1]", line], cwd=home,
                              env=environment(home), capture_output=True, text=True)  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        return [x.split("\t")[0] for x in done.stdout.splitlines()]

    assert "--pending-bits" in candidates("kvlag sim -") and "--policy" in candidates("kvlag sim -")
    assert candidates("kvlag polic") == ["policies"]
    assert candidates("kvlag sim --unit=l") == ["--unit=layer"]
    assert candidates("kvlag sim --unit ") == ["head", "layer", "model"]
    assert candidates("kvlag sim -p 'rmm(la") == ["rmm(lag="]
    assert candidates("kvlag sim -p 'rmm(signal=c") == ["rmm(signal=confidence", "rmm(signal=correct"]
    assert candidates("kvlag sim some") == ["some-trace.h5"]
    assert candidates("kvlag sim --lifetimes=some") == ["--lifetimes=some-trace.h5"]
    assert candidates("kvlag sim --seed so") == []


def test_mistakes():
    assert b"did you mean bash" in kvlag("completion", "bsh").stderr
    for args in [], ["bash", "zsh"], ["bash", "--line", "x"]:
        assert kvlag("completion", *args).returncode == 2
