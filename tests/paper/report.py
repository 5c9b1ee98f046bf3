"""The text of docs/experiments.md: experiments.md beside this file, its marks filled in from docs/experiments/*.csv.

A mark is <<TABLE COLUMN; KEY=VALUE; ...>>, the one row of a CSV that has these values; COLUMN± adds the half width of the
95 % interval, COLUMN% is a share in percent, COLUMN:N has N decimals. <<table NAME>> is one of the tables below. What the
prose says beyond numbers stands in claims(): where one no longer holds, no text is written.
"""
import csv
import re


def share(x, digits=3):
    return ("%.*f" % (digits, x)).replace("0.", ".", 1) if abs(x) < 1 else "%.*f" % (digits, x)


class Tables:
    DEFAULTS = {"reuse": {"variant": "", "lag": "", "pending": "charged"}, "recall": {"lag": ""}, "text": {"lag": ""},
                "lag": {"pending": "charged"}}

    def __init__(self, folder):
        self.rows = {}
        for path in sorted(folder.glob("*.csv")):
            with open(path, newline="") as f:
                self.rows[path.stem] = list(csv.DictReader(f))

    def find(self, table, **where):
        where = self.DEFAULTS.get(table, {}) | where
        found = [r for r in self.rows[table] if all(r[k] == v for k, v in where.items())]
        if len(found) != 1:
            raise SystemExit(f"{len(found)} rows of {table} are {where}")
        return found[0]

    def get(self, table, column, **where):
        return float(self.find(table, **where)[column])

    def cell(self, table, column, **where):
        """A number as the text shows it."""
        digits = 3
        if ":" in column:
            column, digits = column.split(":")
        if column.endswith("%"):
            return "%.0f %%" % (100 * self.get(table, column[:-1], **where))
        row = self.find(table, **where)
        name = column.rstrip("±")
        text = share(float(row[name]), int(digits))
        return text + " ± " + share(float(row["half_width"]), int(digits)) if name != column else text


def lines(head, rows):
    return "\n".join("| " + " | ".join(r) + " |" for r in [head, ["---"] * len(head), *rows])


# ---- the controlled task -----------------------------------------------------------------------------------------------


def table_task(t):
    of = [("oracle(mass)", {}), ("**rmm, lag 8**", dict(spec="rmm", lag="8")), ("rmm, lag 16", dict(spec="rmm", lag="16")),
          *((s, {}) for s in ("lfu", "h2o(hold=0)", "scissorhands-sum", "random", "h2o", "streaming", "ema", "tova", "h2o-mean", "roco",
                              "snapkv-w32-k5-avg", "lru", "window"))]
    of = [(name, where or {"spec": name}) for name, where in of]
    return lines(["policy", "retained", "lost mass"],
                 [[name, t.cell("reuse", "retained±", **w), t.cell("reuse", "lost_mass", **w)] for name, w in of])


def table_lags(t):
    lags = "0 2 4 5 6 8 10 12 16 24 32".split()
    of = [("pending charged", dict(spec="rmm")), ("pending free", dict(spec="rmm", pending="free")),
          ("charged, no signal", dict(spec="rmm(signal=uniform)"))]
    return lines(["lag"] + lags, [[name] + [t.cell("reuse", "retained:2", lag=lag, **w) for lag in lags] for name, w in of])


def table_changed(t):
    names = ["", *dict.fromkeys(r["variant"] for r in t.rows["reuse"] if r["variant"] and not r["variant"].startswith(
        ("--correct", "--flip", "--lag-of-proof")) and r["variant"] != "--failing 0")]
    cell = [[f"`{v}`" if v else "nothing", t.cell("reuse", "retained±", variant=v, spec="rmm", lag="8"),
             t.cell("reuse", "retained±", variant=v, spec="h2o")] for v in names]
    return lines(["changed", "rmm, lag 8", "h2o"], cell)


# ---- recall ------------------------------------------------------------------------------------------------------------


def name_of(spec, lag):
    spec = {"rmm(sinks=4)": "rmm", "rmm(signal=uniform,sinks=4)": "rmm, no signal"}.get(spec, spec)
    return f"{spec}, lag {lag}" if lag else spec


def table_recall(t, model):
    """Added loss and exact match, at both budgets, for facts said once and said again."""
    rows = [r for r in t.rows["recall"] if r["model"] == model and r["spec"] != "full"]
    budgets = sorted({r["budget"] for r in rows}, key=int)
    columns = [(kind, b) for kind in ("once", "again") for b in budgets]
    keys = list(dict.fromkeys((r["spec"], r["lag"]) for r in rows))
    keys.sort(key=lambda k: ("oracle" in k[0], "rmm" in k[0], "uniform" in k[0]))  # filters, rmm, hindsight
    body = []
    for spec, lag in keys:
        where = [dict(model=model, kind=kind, budget=b, spec=spec, lag=lag) for kind, b in columns]
        body.append([name_of(spec, lag)] + [f"{t.cell('recall', 'dloss:2', **w)} ({t.cell('recall', 'exact_match%', **w)})" for w in where])
    return lines(["policy"] + [f"said {k}, budget {b}" for k, b in columns], body)


def table_full(t):
    body = []
    for model in ("tiny", "SmolLM2"):
        for kind in ("once", "again"):
            w = dict(model=model, kind=kind, spec="full")
            row = t.find("recall", **w)
            body.append([model, f"said {kind}", row["texts"], "%.0f" % float(row["tokens"]), t.cell("recall", "loss", **w),
                         t.cell("recall", "exact_match%", **w)])
    return lines(["model", "facts", "documents", "tokens each", "loss an answer token", "answers exact"], body)


# ---- the text ----------------------------------------------------------------------------------------------------------


def table_text(t):
    rows = t.rows["text"]
    budgets = sorted({r["budget"] for r in rows if r["budget"]}, key=int)
    body = []
    for spec, lag in sorted(dict.fromkeys((r["spec"], r["lag"]) for r in rows), key=lambda k: min(
            float(r["loss"]) for r in rows if (r["spec"], r["lag"]) == k and r["budget"] in ("", budgets[0]))):
        cells = []
        for b in budgets:
            mine = [r for r in rows if (r["spec"], r["lag"]) == (spec, lag) and r["budget"] in ("", b)]
            cells += ["%.3f" % float(mine[0]["loss"]), "%.3f" % float(mine[0]["kl"])] if mine else ["", ""]
        body.append([name_of(spec, lag), *cells])
    return lines(["policy"] + [f"{x}, budget {b}" for b in budgets for x in ("loss", "true KL")], body)


def table_lag(t):
    rows = t.rows["lag"]
    lags = list(dict.fromkeys(r["lag"] for r in rows if r["spec"] == "rmm(sinks=4)"))
    budgets = list(dict.fromkeys(r["budget_asked"] for r in rows))
    body = []
    for b in budgets:
        for pending in ("charged", "free"):
            found = {r["lag"]: "%.3f" % float(r["kl_est"]) for r in rows
                     if (r["spec"], r["budget_asked"], r["pending"]) == ("rmm(sinks=4)", b, pending)}
            body.append([f"{b}, pending {pending}"] + [found.get(lag, "") for lag in lags])
    return lines(["budget \\ lag"] + lags, body)


# ---- measuring and accumulating ----------------------------------------------------------------------------------------

WHERE = {"reuse": "controlled task, retained", "once": "tiny, said once, added loss", "again": "tiny, said again, added loss",
         "text": "scripture, estimated KL"}


def table_memory(t):
    body = []
    for where, words in WHERE.items():
        rows = [r for r in t.rows["memory"] if r["where"] == where]
        best = max if where == "reuse" else min
        cells = []
        for name in ("first", "recent", "ema", "sum"):
            r = best((r for r in rows if r["memory"] == name), key=lambda r: float(r["value"]))
            cells.append(f"{share(float(r['value']), 2)} at {r['horizon']}")
        body.append([words, *cells])
    return lines(["where", "first:L", "recent:w", "ema", "sum"], body)


# ---- the text ----------------------------------------------------------------------------------------------------------

TABLES = {"task": table_task, "lags": table_lags, "changed": table_changed, "full": table_full, "text": table_text,
          "lag": table_lag, "memory": table_memory, "recall tiny": lambda t: table_recall(t, "tiny"),
          "recall SmolLM2": lambda t: table_recall(t, "SmolLM2")}


def claims(t):
    """What the prose says, sentence by sentence: (does it hold, the sentence)."""
    return [*claims_of_the_task(t), *claims_of_recall(t), *claims_of_the_text(t), *claims_of_memory(t)]


def interval(t, column, table="recall", **where):
    mean, half = t.get(table, column, **where), t.get(table, "half_width", **where)
    return mean - half, mean + half


def claims_of_the_task(t):
    def kept(spec, lag="", **more):
        return t.get("reuse", "retained", spec=spec, lag=lag, **more)

    def at(spec, lag="", **more):
        return interval(t, "retained", "reuse", spec=spec, lag=lag, **more)

    base = kept("rmm", "8")
    rows = [r for r in t.rows["reuse"] if r["variant"].startswith("--distract") and r["spec"] == "rmm"]
    flips = [base] + [kept("rmm", "8", variant=f"--flip {x}") for x in (0.05, 0.1, 0.2, 0.5)]
    always = {"variant": "--correct always"}
    return [
        (base >= 0.95 and at("rmm", "8")[0] > 0.9, "rmm at lag 8 keeps .95 of the facts"),
        (at("h2o")[1] < 0.3 and at("streaming")[1] < 0.1, "H2O keeps fewer than .3, StreamingLLM about none"),
        (kept("oracle(mass)") == 1, "hindsight keeps every fact"),
        (at("rmm", "5")[1] < 0.25 and at("rmm", "6")[0] > 0.9, "the knee lies where the proof arrives"),
        (all(at("rmm", f"{n - 1}", variant=f"--lag-of-proof {n}")[1] < 0.25 and
             at("rmm", f"{n}", variant=f"--lag-of-proof {n}")[0] > 0.9 for n in (3, 12)), "and moves with it"),
        (kept("rmm", "32") < 0.5 < 0.95 < kept("rmm", "32", pending="free"), "where waiting costs no memory facts stay"),
        (kept("rmm", "8", **always) == kept("mix(memory=first:8,hold=8)", "8", **always), "without a signal rmm is truncated H2O"),
        (all(float(r["retained"]) == base for r in rows) and len(rows) == 3, "distractors never matter to rmm"),
        (at("rmm(signal=uniform)", "8", variant="--failing 0")[0] > 0.95 and at("rmm(signal=uniform)", "8")[1] < 0.1,
         "stopping is enough where nothing distracts, and worth nothing where something does"),
        (t.get("held", "mean", held="last 20") == 20 and t.get("held", "mean", held="facts between") == 0,
         "H2O holds its recent half and no fact"),
        (flips == sorted(flips, reverse=True) and flips[-1] < 0.2, "the more often the signal errs the fewer facts stay"),
    ]


def claims_of_recall(t):
    def at(model, kind, budget, spec, lag=""):
        return interval(t, "dloss", model=model, kind=kind, budget=budget, spec=spec, lag=lag)

    def cost(model, kind, budget, spec, lag=""):
        return t.get("recall", "dloss", model=model, kind=kind, budget=budget, spec=spec, lag=lag)

    rmm, blind = "rmm(sinks=4)", "rmm(signal=uniform,sinks=4)"
    smol = [at("SmolLM2", "once", "64", spec, lag) for spec, lag in (
        (rmm, "8"), (rmm, "16"), (rmm, "32"), ("h2o", ""), ("oracle(mass)", ""))]
    filters = ("h2o", "ema", "tova", "streaming")
    return [
        (all(at("tiny", "again", b, rmm, "8")[1] < at("tiny", "again", b, f)[0] for b in ("64", "128") for f in filters),
         "tiny, said again: rmm at lag 8 beats every filter at both budgets, intervals apart"),
        (at("tiny", "again", "64", rmm, "32")[0] > at("tiny", "again", "64", rmm, "8")[1], "a lag of half the budget is too long"),
        (all(at("tiny", "once", b, rmm, "4")[0] > at("tiny", "once", b, "h2o")[1] for b in ("64", "128")),
         "tiny, said once: rmm at lag 4 loses to h2o at both budgets, intervals apart"),
        (all(cost("tiny", "once", "128", rmm, lag) > cost("tiny", "once", "128", "h2o") for lag in ("2", "4", "8", "16", "32")),
         "tiny, said once, budget 128: rmm loses to h2o at every lag"),
        (cost("tiny", "once", "64", rmm, "32") < cost("tiny", "once", "64", "h2o"), "at 64 only the longest lag is ahead"),
        (all(abs(cost("tiny", "again", "64", rmm, lag) - cost("tiny", "again", "64", blind, lag)) < 0.05 for lag in ("4", "8", "16")),
         "tiny, said again: the signal makes no difference"),
        (all(cost("tiny", k, b, "tova") > cost("tiny", k, b, f) for k in ("once", "again") for b in ("64", "128")
             for f in ("h2o", "ema", "streaming")), "tova is the worst on tiny"),
        (cost("tiny", "again", "64", "oracle(mass)") > cost("tiny", "again", "64", rmm, "8"), "most mass is not least loss"),
        (all(at("SmolLM2", "again", "64", rmm, "16")[1] < at("SmolLM2", "again", "64", f)[0] for f in filters),
         "SmolLM2, said again: rmm at lag 16 beats every filter, intervals apart"),
        (cost("SmolLM2", "again", "64", rmm, "8") > cost("SmolLM2", "again", "64", "h2o"), "lag 8 ends before the proof"),
        (max(low for low, _ in smol) < min(high for _, high in smol), "SmolLM2, said once: intervals overlap"),
        (min(cost("SmolLM2", "once", "64", rmm, lag) for lag in ("8", "16", "32")) > 2, "and no policy keeps the facts"),
        ([cost("SmolLM2", "once", "64", rmm, lag) for lag in ("8", "16", "32")] ==
         sorted(cost("SmolLM2", "once", "64", rmm, lag) for lag in ("8", "16", "32")), "from lag 8 to 32 it grows"),
    ]


def claims_of_the_text(t):
    def cost(budget, spec, lag=""):
        return t.get("text", "dloss", budget=budget, spec=spec, lag=lag)

    rmm = "rmm(sinks=4)"
    return [
        (all(cost("200", rmm, "32") > 1.5 * cost("200", f) for f in ("h2o", "streaming", "ema", "tova")) and
         all(cost("500", rmm, "32") > 3 * cost("500", f) for f in ("h2o", "streaming")), "on ordinary text fixed-lag loses"),
        (cost("200", rmm, "8") > cost("200", rmm, "32") > cost("200", rmm, "128"), "a longer lag helps"),
        (all(cost(b, "oracle(loss)") < cost(b, f) for b in ("200", "500") for f in ("h2o", "streaming", "oracle(mass)")),
         "hindsight by loss pays least"),
    ]


def claims_of_memory(t):
    def best(where, name):
        values = [float(r["value"]) for r in t.rows["memory"] if (r["where"], r["memory"]) == (where, name)]
        return max(values) if where == "reuse" else min(values)

    return [
        (best("reuse", "first") > 0.95 > 0.6 > best("reuse", "sum") > 0.4 and best("reuse", "ema") < 0.1 > best("reuse", "recent"),
         "on the task measuring keeps nearly all facts, a sum half of them, what forgets none"),
        (best("once", "sum") < 0.6 * best("once", "first"), "said once, a sum of right rows is far ahead of measuring"),
        (abs(best("again", "sum") - best("again", "first")) < 0.02, "said again, both do as well"),
        (max(best("text", "recent"), best("text", "ema")) < 0.85 * min(best("text", "first"), best("text", "sum")),
         "on scripture what forgets is ahead"),
        (t.get("memory", "value", where="once", memory="sum", horizon="32")
         < 0.8 * t.get("recall", "dloss", model="tiny", kind="once", budget="64", spec="h2o"), "the signal helps a sum"),
    ]


def fill(t, mark):
    what, *where = mark.split("; ")
    table, column = what.split(" ", 1)
    if table == "table":
        return TABLES[column](t)
    return t.cell(table, column, **dict(w.split("=", 1) for w in where))


def text(folder, template):
    t = Tables(folder)
    broken = [sentence for holds, sentence in claims(t) if not holds]
    if broken:
        raise SystemExit("the text says what no longer holds:\n  " + "\n  ".join(broken))
    with open(template) as f:
        return re.sub("<<(.*?)>>", lambda m: fill(t, m[1]), f.read())
