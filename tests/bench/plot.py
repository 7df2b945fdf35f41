#!/usr/bin/python3
"""Draws docs/bench.json, which `make bench` writes, as SVG beside it; docs/bench.md shows them. docs/bench-nodes.json is drawn for
docs/nodes-protocol.md.

usage: plot.py BENCH_JSON FOLDER

Each picture has the colours of a light page, and rules that replace them where the reader prefers dark ones.
tests/docs/pictures.py checks that, and that no legend lies on a line.
"""

import colorsys
import io
import json
import os
import re
import sys

import matplotlib

matplotlib.use("svg")
# The same figures give the same file.
matplotlib.rcParams["svg.hashsalt"] = "coxswain"
matplotlib.rcParams["font.size"] = 9
# Those of docs/coxswain.svg.
INK, GROUND, DARK_GROUND = "#1b1f24", "#ffffff", "#0f141a"
for what in "text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color":
    matplotlib.rcParams[what] = INK
import matplotlib.pyplot as plt  # noqa: E402

FLOORS = ["semaphore", "futex"]
OWN = ["named", "sealed"]
PEERS = ["seqpacket", "iceoryx", "zmq", "nng", "mpi", "pickle"]
LABELS = {
    "semaphore": "raw semaphores (floor)",
    "futex": "raw futex (floor)",
    "named": "Coxswain, named",
    "sealed": "Coxswain, sealed",
    "seqpacket": "Unix seqpacket",
    "iceoryx": "iceoryx, WaitSet",
    "zmq": "ZeroMQ ipc",
    "nng": "nng ipc, surveyor",
    "mpi": "Open MPI (spins)",
    "pickle": "pickle ring (spins)",
}
COLORS = {
    "semaphore": "0.45", "futex": "0.7", "named": "tab:blue", "sealed": "tab:red",
    "seqpacket": "tab:green", "iceoryx": "tab:olive", "zmq": "tab:purple", "nng": "tab:brown",
    "mpi": "tab:orange", "pickle": "tab:pink",
}
PYTHON = {
    "named-collect": ("Coxswain, a call in C", "0.45", "--"),
    "py-call-c": ("Coxswain, call, workers in C", "tab:cyan", "-"),
    "py-call": ("Coxswain, call", "tab:blue", "-"),
    "py-await": ("Coxswain, await", "tab:red", "-"),
    "py-pipe": ("multiprocessing.connection", "tab:green", "-"),
    "py-zmq": ("pyzmq", "tab:purple", "-"),
    "py-vllm": ("vLLM's MessageQueue (spins)", "tab:orange", "-"),
    "pickle": ("pickle ring (spins)", "tab:pink", "-"),
}
OWN_PYTHON = ["py-call-c", "py-call", "py-await"]
# Of the line that says what one more rank costs; those of the target.
SLOPE_RANKS = range(4, 33)


class Bench:
    def __init__(self, path):
        with open(path) as file:
            self.all = json.load(file)

    def values(self, section, name):
        return sorted({row[name] for row in self.all["rows"] if row["section"] == section})

    def points(self, section, kind, x, y="p50_us", placement="free", **where):
        """(x, y) of every row of a section, kind and placement that has figures."""
        where["placement"] = placement
        found = [(row[x], row[y]) for row in self.all["rows"]
                 if row["section"] == section and row["kind"] == kind and y in row
                 and all(row[name] == value for name, value in where.items())]
        return sorted(dict(found).items())


def axes(title, xlabel, ylabel, log="xy"):
    figure, ax = plt.subplots(figsize=(8.8, 4.4))
    ax.set_title(title)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    if "x" in log:
        ax.set_xscale("log", base=2)
    if "y" in log:
        ax.set_yscale("log")
    ax.grid(True, which="both", alpha=0.25)
    return figure, ax


def ticks(ax, values, text=str):
    """Of an axis in powers of two: the values that were measured, and no others."""
    ax.set_xticks(values, [text(value) for value in values])
    ax.minorticks_off()


def legend(*all_axes):
    """One for all, beside the last: it lies on no line."""
    found = {label: handle for ax in all_axes
             for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    if found:
        all_axes[-1].legend(found.values(), found.keys(), fontsize=8, frameon=False, loc="upper left",
                            bbox_to_anchor=(1.02, 1))


def draw(ax, kind, points, label=None, **style):
    if points:
        ax.plot(*zip(*points), marker="o", markersize=3, color=COLORS[kind],
                linewidth=2 if kind in OWN else 1.1,
                linestyle="--" if kind in FLOORS else "-", label=label or LABELS[kind], **style)


def size_text(size):
    for unit in "B", "KiB", "MiB":
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.0f} GiB"


def slope(points):
    n = len(points)
    sx, sy = sum(x for x, _ in points), sum(y for _, y in points)
    return ((n * sum(x * y for x, y in points) - sx * sy)
            / (n * sum(x * x for x, _ in points) - sx * sx))


def latency_by_ranks(bench, title, section, **where):
    figure, ax = axes("4 KiB to every worker, 256 bytes back" + title, "workers", "p50 of a round, µs")
    for kind in FLOORS + OWN + PEERS:
        draw(ax, kind, bench.points(section, kind, "ranks", bytes=4096, **where))
    ticks(ax, bench.values(section, "ranks"))
    legend(ax)
    return figure


def latency_by_bytes(bench):
    figure, ax = axes("4 workers, 256 bytes back", "bytes of a request", "p50 of a round, µs")
    for kind in FLOORS + OWN + PEERS:
        draw(ax, kind, bench.points("bytes", kind, "bytes", ranks=4, busy=False))
    ticks(ax, bench.values("bytes", "bytes"), size_text)
    legend(ax)
    return figure


def growth_by_ranks(bench, title, placement):
    figure, ax = axes("What one more worker costs, 4 KiB requests" + title, "workers",
                      "p50 of a round, µs", log="")
    for kind in FLOORS + OWN:
        points = bench.points("per-rank", kind, "ranks", placement=placement)
        line = [point for point in points if point[0] in SLOPE_RANKS]
        text = f"{LABELS[kind]}:\n{slope(line):.2f} µs a rank" if len(line) > 1 else None
        draw(ax, kind, points, label=text)
    ax.set_ylim(bottom=0)
    legend(ax)
    return figure


def growth_by_bytes(bench):
    figure, ax = axes("What one more byte costs, 4 workers", "bytes of a request",
                      "p50 of a round, µs")
    for kind in FLOORS + OWN:
        points = bench.points("per-byte", kind, "bytes")
        line = [point for point in points if point[0] >= 1 << 20]
        text = (f"{LABELS[kind]}:\n{slope(line) * 1024 * 1000:.0f} ns a KiB from 1 MiB on"
                if len(line) > 1 else None)
        draw(ax, kind, points, label=text)
    ticks(ax, bench.values("per-byte", "bytes")[::2], size_text)
    legend(ax)
    return figure


def depth(bench):
    figure, ax = axes("Requests completed a second, sealed, 4 KiB", "in flight, or callers",
                      "requests a second", log="x")
    for way, marker in ("depth", "o"), ("callers", "s"):
        for ranks, color in (4, "tab:red"), (8, "tab:blue"):
            points = []
            for count in 1, 2, 4, 8:
                points += [(count, 1e6 / mean) for _, mean in
                           bench.points("depth", f"{way}-{count}", "ranks", "mean_us", ranks=ranks)]
            if points:
                what = "submitted ahead" if way == "depth" else "threads that call"
                ax.plot(*zip(*points), marker=marker, color=color,
                        linestyle="-" if way == "depth" else ":", label=f"{what}, {ranks} workers")
    ticks(ax, [1, 2, 4, 8])
    ax.set_ylim(bottom=0)
    legend(ax)
    return figure


def steps(bench):
    figure, ax = axes("A decode step, protobuf both ways, sealed", "workers",
                      "p50 of a round, µs")
    for kind, label, color in (
            ("sealed-bytes", "as many opaque bytes\nas 16 sequences", "0.6"),
            ("sealed-step-16", "16 sequences", "tab:red"),
            ("sealed-step-256", "256 sequences", "tab:orange"),
            ("sealed-step-1024", "1,024 sequences", "tab:purple"),
            ("pickle-step-256", "256 sequences, a pickle ring", "tab:pink")):
        points = bench.points("steps", kind, "ranks", busy=False)
        if points:
            ax.plot(*zip(*points), marker="o", markersize=3, color=color, label=label)
    ticks(ax, bench.values("steps", "ranks"))
    legend(ax)
    return figure


def start(bench):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for kind in OWN:
        draw(left, kind, bench.points("start", kind, "ranks", "start_ms"))
        memory = bench.points("start", kind, "ranks", "pss_kib")
        draw(right, kind, [(ranks, kib / 1024) for ranks, kib in memory])
    left.set_title("From start to every worker attached")
    left.set_ylabel("ms")
    right.set_title("Memory of all processes, shared pages once")
    right.set_ylabel("MiB")
    for ax in left, right:
        ax.set_xlabel("workers")
        ax.set_ylim(bottom=0)
        ax.grid(True, alpha=0.25)
    legend(left, right)
    return figure


def model(bench):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    rows = bench.all.get("model", {}).get("rows", [])
    for mode, style in ("off", "--"), ("on", "-"):
        def line(ax, name, color, label, scale=1, mode=mode, style=style):
            points = [(row["ranks"], row[name] * scale) for row in rows
                      if row["async"] == mode and row[name] is not None]
            if points:
                ax.plot(*zip(*points), marker="o", markersize=3, color=color, linestyle=style,
                        label=f"{label}, async {mode}")
        line(left, "tokens_per_second", "tab:blue", "tokens a second")
        line(right, "channel_p50_share", "tab:red", "channel (p50 by p50)", 100)
        line(right, "group_share", "tab:green", "rank group", 100)
        line(right, "group_wait_share", "tab:olive", "of it waiting", 100)
    left.set_title("Tokens a second")
    right.set_title("Shares of a step, %")
    for ax in left, right:
        ax.set_xlabel("workers")
        ax.set_ylim(bottom=0)
        ax.grid(True, alpha=0.25)
    legend(left, right)
    return figure


def python(bench):
    figure, axes_ = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True)
    for ax, placement in zip(axes_, ("free", "one processor"), strict=True):
        for kind, (label, color, style) in PYTHON.items():
            points = bench.points("python", kind, "ranks", placement=placement)
            if points:
                ax.plot(*zip(*points), marker="o", markersize=3, color=color, linestyle=style, label=label,
                        linewidth=2 if kind in OWN_PYTHON else 1.1)
        ax.set_title("placed by the kernel" if placement == "free" else placement)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ticks(ax, bench.values("python", "ranks"))
        ax.set_xlabel("workers")
        ax.grid(True, which="both", alpha=0.25)
    axes_[0].set_ylabel("p50 of a round from Python, µs")
    legend(*axes_)
    return figure


def nodes(bench):
    figure, axes_ = plt.subplots(2, 2, figsize=(11, 7.6))
    (cost, lead), (memory, death) = axes_

    def line(ax, kind, mode, figure_, label, color, scale=1.0, style="-"):
        points = bench.points("nodes", kind, "ranks", figure_, mode=mode)
        if points:
            ax.plot(*zip(*((count, value * scale) for count, value in points)), marker="o", markersize=3, color=color,
                    linestyle=style, label=label)

    for mode, style, what in ("full", "-", "back to back"), ("paced", "--", "one each 10 ms"):
        line(cost, "coxswain", mode, "p50_us", f"Coxswain, {what}", "tab:blue", style=style)
        line(cost, "nats", mode, "p50_us", f"bare NATS, {what}", "0.5", style=style)
        line(lead, "coxswain", mode, "lead_us", f"Coxswain, {what}", "tab:blue", style=style)
        line(lead, "nats", mode, "lead_us", f"bare NATS, {what}", "0.5", style=style)
    line(memory, "coxswain", "full", "lead_kib", "memory of the lead", "tab:red", 1 / 1024)
    line(death, "coxswain", "full", "dead_ms", "a node falls silent", "tab:purple")
    line(death, "coxswain", "paced", "dead_ms", "a node is killed", "tab:green")
    for ax, title, unit in ((cost, "A step", "p50, µs"), (lead, "CPU time of the lead in a step", "µs"),
                            (memory, "Memory of the lead, shared pages in parts", "MiB"),
                            (death, "From the end of a node to the step that fails", "ms")):
        ax.set_title(title)
        ax.set_ylabel(unit)
        ax.set_xlabel("nodes")
        ax.set_xscale("log", base=2)
        ticks(ax, bench.values("nodes", "ranks"))
        ax.set_ylim(bottom=0)
        ax.grid(True, alpha=0.25)
    legend(cost, lead)
    legend(memory, death)
    return figure


def of_dark_page(color):
    """Greys are inverted; other colours are as light as they have to be on a dark ground."""
    if color == GROUND:
        return DARK_GROUND
    hue, lightness, saturation = colorsys.rgb_to_hls(*(int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)))
    lightness = 1 - 0.6 * lightness if saturation < 0.2 else max(lightness, 0.65)
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, lightness, saturation))


def save(figure, path):
    drawn = io.StringIO()
    figure.tight_layout()
    figure.savefig(drawn, metadata={"Date": None})
    svg = drawn.getvalue()
    rules = "".join(f"""[style*="{what}: {color}"] {{ {what}: {of_dark_page(color)} !important; }}\n"""
                    for what, color in sorted(set(re.findall(r"(fill|stroke): (#[0-9a-f]{6})", svg))))
    svg = svg.replace("</style>", f"\n@media (prefers-color-scheme: dark) {{\n{rules}}}\n</style>", 1)
    with open(path, "w", encoding="utf-8") as file:
        file.write(svg)


def main():
    bench = Bench(sys.argv[1])
    for name, figure in (
            ("latency-ranks", latency_by_ranks(bench, "", "bytes", busy=False)),
            ("latency-ranks-one", latency_by_ranks(bench, ", on one processor", "packed",
                                                   placement="one processor")),
            ("latency-ranks-busy", latency_by_ranks(bench, ", two busy loops beside", "bytes", busy=True)),
            ("latency-bytes", latency_by_bytes(bench)),
            ("growth-ranks", growth_by_ranks(bench, "", "free")),
            ("growth-ranks-one", growth_by_ranks(bench, ", on one processor", "one processor")),
            ("growth-bytes", growth_by_bytes(bench)),
            ("depth", depth(bench)),
            ("steps", steps(bench)),
            ("python", python(bench)),
            ("start", start(bench)),
            ("model", model(bench)),
            ("nodes", nodes(bench))):
        # A section that was not measured leaves its picture as it is.
        if any(ax.lines for ax in figure.axes):
            save(figure, os.path.join(sys.argv[2], f"bench-{name}.svg"))
        plt.close(figure)


main()
