#!/usr/bin/python3
"""Draws the chart of README.md from docs/bench.json: Coxswain beside other ways to ask processes.

usage: peers.py BENCH_JSON OUTPUT_SVG          writes the chart
       peers.py --check BENCH_JSON CHART_SVG   fails if it is not that of BENCH_JSON

Needs no packages. Two panels: every process where the kernel puts it, and all on one processor;
docs/bench.md says why there are two.
"""

import json
import sys

RANKS, BYTES = 8, 4096
KINDS = [("sealed", "Coxswain, sealed"), ("named", "Coxswain, named"),
         ("seqpacket", "Unix seqpacket"), ("mpi", "Open MPI (spins)"),
         ("pickle", "pickle ring (spins)"), ("zmq", "ZeroMQ ipc")]
PANELS = [("bytes", "free", "placed by the kernel"),
          ("packed", "one processor", "all on one processor")]
LABEL_WIDTH, PANEL_WIDTH, BAR, ROW, TOP = 162, 290, 16, 28, 66
STYLE = """\
    .ground { fill: #ffffff; } .text { fill: #1b1f24; } .small { fill: #4c535c; font-size: 12px; }
    .own { fill: #3566b0; } .peer { fill: #a7adb5; }
    @media (prefers-color-scheme: dark) {
      .ground { fill: #0f141a; } .text { fill: #e8ecf1; } .small { fill: #aab3bd; }
      .own { fill: #7fa6e0; } .peer { fill: #5b646e; }
    }"""


def p50(bench, section, placement, kind):
    found = [row["p50_us"] for row in bench["rows"]
             if (row["section"], row["placement"], row["kind"]) == (section, placement, kind)
             and row["ranks"] == RANKS and row["bytes"] == BYTES and not row.get("busy")
             and "p50_us" in row]
    return found[0] if found else None


def panel(bench, section, placement, title, x):
    values = [p50(bench, section, placement, kind) for kind, _ in KINDS]
    largest = max(value for value in values if value is not None)
    lines = ['  <text class="text" x="%d" y="%d">%s</text>' % (x, TOP - 12, title)]
    for i, value in enumerate(values):
        y = TOP + i * ROW
        if value is None:
            lines.append('  <text class="small" x="%d" y="%d">not measured</text>' % (x, y + 13))
            continue
        width = (PANEL_WIDTH - 60) * value / largest
        lines.append('  <rect class="%s" x="%d" y="%d" width="%.1f" height="%d"/>' %
                     ("own" if i < 2 else "peer", x, y, width, BAR))
        lines.append('  <text class="small" x="%.1f" y="%d">%.0f µs</text>' %
                     (x + width + 6, y + 13, value))
    return lines


def chart(bench):
    width = LABEL_WIDTH + 2 * PANEL_WIDTH + 30
    height = TOP + len(KINDS) * ROW + 34
    machine = bench["machine"]
    lines = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" '
             'role="img" font-family="system-ui, sans-serif" font-size="13">' %
             (width, height, width, height),
             "  <title>p50 of a round: Coxswain and peers, %d workers</title>" % RANKS,
             "  <style>", STYLE, "  </style>",
             '  <rect class="ground" width="%d" height="%d" rx="10"/>' % (width, height),
             '  <text class="text" x="16" y="26" font-weight="600">p50 of a round, %d workers: 4 KiB to each, '
             '256 bytes back (less is better)</text>' % RANKS]
    for i, (_, label) in enumerate(KINDS):
        lines.append('  <text class="text" x="%d" y="%d" text-anchor="end">%s</text>' %
                     (LABEL_WIDTH, TOP + i * ROW + 13, label))
    for i, (section, placement, title) in enumerate(PANELS):
        lines += panel(bench, section, placement, title, LABEL_WIDTH + 14 + i * (PANEL_WIDTH + 10))
    lines.append('  <text class="small" x="16" y="%d">docs/bench.json of %s: %d processors of a '
                 'virtual machine, Linux %s</text>' %
                 (height - 14, machine["date"], machine["processors"],
                  machine["kernel"].split("-")[0]))
    return "\n".join([*lines, "</svg>", ""])


def main():
    check = sys.argv[1:2] == ["--check"]
    names = sys.argv[1 + check:]
    if len(names) != 2:
        sys.exit(__doc__)
    with open(names[0], encoding="utf-8") as file:
        text = chart(json.load(file))
    if check:
        with open(names[1], encoding="utf-8") as file:
            if file.read() != text:
                sys.exit("%s is not drawn from %s: python3 tests/bench/peers.py %s %s" %
                         (names[1], names[0], *names))
        return
    with open(names[1], "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    main()
