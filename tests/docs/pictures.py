#!/usr/bin/python3
"""Checks the pictures of the documentation, docs/*.svg, as far as that can be done without eyes.

Usage: pictures.py SOURCE_DIR

  * Each has dark colours for readers that prefer them: of the ground, of texts, and of whatever else has a colour.
  * A plot's legend lies beside the axes, where it hides no line, and its ticks are the numbers of workers that were measured.
  * bench-python.svg says which series are Coxswain's.
  * A text that stays a text, in whatever font the reader has, fits into its box.
"""

import glob
import json
import os
import re
import sys
import xml.etree.ElementTree

SVG = "{http://www.w3.org/2000/svg}"
# Widths of a character of a wide font, DejaVu Sans or Verdana, on average and by its size.
PLAIN, BOLD = 0.62, 0.72
MARGIN = 4


def numbers(text):
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", text)]


def dark_rules(svg):
    found = re.search(r"@media \(prefers-color-scheme: dark\) \{(.*?)\}\s*(?:</style>|\}\s*</style>)", svg, re.S)
    return found[1] if found else ""


def colors(svg):
    dark = dark_rules(svg)
    if not dark:
        return ["it has no dark colours"]
    inline = set(re.findall(r'style="[^"]*?((?:fill|stroke): #[0-9a-f]{6})', svg))
    wrong = ["no dark colour for %s" % color for color in sorted(inline) if color not in dark]
    light = set(re.findall(r"\.(\w+) \{", svg.split("@media")[0]))
    return wrong + ["no dark colour for .%s" % name for name in sorted(light) if ".%s {" % name not in dark]


def of_plot(svg):
    right = max(max(numbers(path)[::2])
                for path in re.findall(r'<g id="axes_\d+">\s*<g id="patch_\d+">\s*<path d="([^"]*)"', svg))
    wrong = []
    for legend in re.findall(r'<g id="legend_\d+">(.*?)(?=<g id="(?:axes|legend)_|\Z)', svg, re.S):
        placed = re.findall(r'(?:translate\(|d="M )(-?[\d.]+)', re.sub(r"<defs>.*?</defs>", "", legend, flags=re.S))
        left = min(float(x) for x in placed)
        if left < right:
            wrong.append("the legend, from %g on, lies on the axes, which end at %g" % (left, right))
    return wrong


def ticks(svg, values):
    found = re.findall(r'<g id="xtick_\d+">.*?<!-- (\S+) -->', svg, re.S)
    return ["there is no tick at %s" % value for value in values if str(value) not in found]


def read_bench(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def ranks_of(bench, section):
    return sorted({row["ranks"] for row in bench["rows"] if row["section"] == section})


def texts_of_drawing(svg):
    root = xml.etree.ElementTree.fromstring(svg)
    width = numbers(root.get("viewBox"))[2]
    boxes = [[float(rect.get(name)) for name in ("x", "y", "width", "height")] for rect in root.iter(SVG + "rect")
             if rect.get("class") in ("box", "memory")]
    wrong = []
    for text in root.iter(SVG + "text"):
        size = 12 if text.get("class") == "small" else float(text.get("font-size") or root.get("font-size"))
        room = size * len(text.text) * (BOLD if text.get("font-weight") else PLAIN)
        left, y = float(text.get("x")), float(text.get("y"))
        left -= {"middle": room / 2, "end": room}.get(text.get("text-anchor"), 0)
        at = left + room / 2
        x, end = next(((x, x + w) for x, top, w, h in boxes if x < at < x + w and top < y < top + h), (0, width))
        if left < x + MARGIN or left + room > end - MARGIN:
            wrong.append("'%s' may need %.0f to %.0f, and has %.0f to %.0f" % (text.text, left, left + room, x, end))
    return wrong


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    docs = os.path.join(os.path.abspath(sys.argv[1]), "docs")
    bench, python = (read_bench(os.path.join(docs, name)) for name in ("bench.json", "bench-python.json"))
    wrong = []
    names = sorted(os.path.basename(path) for path in glob.glob(os.path.join(docs, "*.svg")))
    for name in names:
        with open(os.path.join(docs, name), encoding="utf-8") as file:
            svg = file.read()
        found = colors(svg) + (of_plot(svg) if 'id="axes_1"' in svg else texts_of_drawing(svg))
        if name == "bench-steps.svg":
            found += ticks(svg, ranks_of(bench, "steps"))
        if name == "bench-python.svg":
            found += ticks(svg, ranks_of(python, "python"))
            labels = re.findall(r"<!-- (.*?) -->", svg[svg.index('<g id="legend_'):])
            found += [] if sum(label.startswith("Coxswain, ") for label in labels) >= 3 else ["whose series are these? %s" % labels]
        wrong += ["docs/%s: %s" % (name, problem) for problem in found]
    print("\n".join(wrong) or "%d pictures" % len(names))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
