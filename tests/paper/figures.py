"""The pictures of docs/experiments.md that kvlag analyze has no kind for, drawn by gnuplot in its manner."""
import csv
import shutil
import subprocess

HEAD = """set encoding utf8
set terminal pngcairo size 485*%g,485*%g fontscale 5.05 linewidth 5.05 pointscale 5.05 noenhanced font 'DejaVu Sans,7'
set output '%s'
set border 3 linewidth 0.5
set tics nomirror out scale 0.4
set key top left Left reverse samplen 1.5 spacing 1.05
set style fill transparent solid 0.18 noborder
"""
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999"]


def rows(docs, name):
    with open(docs / f"{name}.csv", newline="") as f:
        return list(csv.DictReader(f))


class Picture:
    """Panels of curves over a lag or a horizon; one inline data block a curve."""

    def __init__(self, width, height):
        self.size, self.blocks, self.panels = (width, height), [], []

    def panel(self, title, xlabel, ylabel, more=""):
        self.panels.append([f"set title '{title}'\nset xlabel '{xlabel}'\nset ylabel '{ylabel}'\n{more}", []])

    def _add(self, points, look):
        name = f"$d{len(self.blocks)}"
        self.blocks.append(f"{name} << E\n" + "".join(" ".join("%.6g" % v for v in p) + "\n" for p in points) + "E\n")
        self.panels[-1][1].append(look.replace("DATA", name))

    def curve(self, points, colour, title, look="pointtype 7 pointsize 0.35", line="dashtype solid"):
        """points (x, y, half width); lines, and a band where there is one."""
        points = sorted(points)
        if not points:
            return
        if any(half for _, _, half in points):
            self._add([(x, y - h, y + h) for x, y, h in points],
                      f"DATA using 1:2:3 with filledcurves linecolor rgb '{COLOURS[colour]}' notitle")
        self._add([(x, y) for x, y, _ in points], f"DATA using 1:2 with linespoints linecolor rgb '{COLOURS[colour]}' {line} {look} "
                  + (f"title '{title}'" if title else "notitle"))

    def level(self, y, colour, title, lo, hi):
        self._add([(lo, y), (hi, y)], f"DATA using 1:2 with lines dashtype (8,5) linewidth 0.7 linecolor rgb '{COLOURS[colour]}' "
                  + (f"title '{title}'" if title else "notitle"))

    def draw(self, path, columns):
        script = HEAD % (*self.size, path) + "".join(self.blocks)
        script += f"set multiplot layout {-(-len(self.panels) // columns)},{columns}\n"
        for settings, curves in self.panels:
            script += settings + "plot " + ", \\\n  ".join(curves) + "\nunset logscale\nset key on\n"
        subprocess.run(["gnuplot", "-d"], input=script + "unset multiplot\n", text=True, check=True)


def curve_of(found, x="lag", y="retained"):
    return [(float(r[x]), float(r[y]), float(r["half_width"] or 0)) for r in found]


def task(docs):
    found = [r for r in rows(docs, "reuse") if not r["variant"]]
    p = Picture(3.6, 2.6)
    p.panel("", "lag", "facts still held when needed", "set yrange [0:1.02]\nset xrange [0:32]\nset key at graph 0.98,0.55 right\n")
    p.curve(curve_of(r for r in found if r["spec"] == "rmm" and r["pending"] == "charged"), 0, "rmm")
    p.curve(curve_of(r for r in found if r["spec"] == "rmm" and r["pending"] == "free"), 4, "rmm, waiting costs no memory")
    p.curve(curve_of(r for r in found if r["spec"] == "rmm(signal=uniform)" and r["pending"] == "charged"), 1, "rmm without the signal")
    for spec, colour in (("h2o", 2), ("random", 7), ("streaming", 3)):
        p.level(next(float(r["retained"]) for r in found if r["spec"] == spec), colour, spec, 0, 32)
    p.draw(docs / "task.png", 1)


def recall(docs):
    p = Picture(6.6, 4.6)
    for model in "tiny", "SmolLM2":
        for kind, words in (("once", "said once"), ("again", "said again at once")):
            found = [r for r in rows(docs, "recall") if (r["model"], r["kind"], r["budget"]) == (model, kind, "64")]
            p.panel(f"{model}: facts {words}", "lag", "loss added, nats a token",
                    f"set logscale x 2\nset xrange [2:32]\nset yrange [0:{3 if model == 'tiny' else '*'}]\n"
                    + ("set key top right\n" if model == "tiny" and kind == "again" else "set key off\n"))
            for spec, colour, name in (("rmm(sinks=4)", 0, "rmm"), ("rmm(signal=uniform,sinks=4)", 1, "rmm without the signal")):
                p.curve(curve_of((r for r in found if r["spec"] == spec), y="dloss"), colour, name)
            for spec, colour in (("h2o", 2), ("ema", 5), ("streaming", 3)):
                p.level(next(float(r["dloss"]) for r in found if r["spec"] == spec), colour, spec, 2, 32)
    p.draw(docs / "recall.png", 2)


def memory(docs):
    p = Picture(6.6, 4.6)
    panels = (("reuse", "controlled task, budget 40", "facts still held when needed", "set yrange [0:1.02]\n"),
              ("text", "2000 tokens of scripture, budget 200", "estimated KL, nats a token", "set yrange [0:*]\n"),
              ("once", "tiny, facts said once, budget 64", "true loss added, nats", "set yrange [0:*]\n"),
              ("again", "tiny, facts said again, budget 64", "true loss added, nats", "set yrange [0:*]\n"))
    for where, title, ylabel, more in panels:
        found = [r for r in rows(docs, "memory") if r["where"] == where]
        p.panel(title, "horizon = hold", ylabel, more + "set logscale x 2\nset xrange [2:*]\n" + ("set key top right\n" if where == "once" else "set key off\n"))
        for n, name in enumerate(("first:L", "recent:w", "ema", "sum")):
            p.curve(curve_of((r for r in found if r["memory"] == name.split(":")[0]), "horizon", "value"), n, name)
    p.draw(docs / "memory.png", 2)


def draw(docs, work):
    task(docs)
    recall(docs)
    memory(docs)
    shutil.copy(work / "lag/lag_rmm_sinks_4_kl_est.png", docs / "text.png")
