#!/usr/bin/python3
"""Builds the documentation as a site: docs_site.py FOLDER

FOLDER/source is what Sphinx reads, FOLDER/html the site. The pages are those of the repository; the
reference of the C headers is made by tools/c_reference.py, and MADE of the sources. Links to a header lead to its page
there, links to other files to copies. A warning is a failure. Exit status 77: Sphinx with MyST is
not here.
"""

import glob
import importlib.util
import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
CONTENTS = "docs/README.md"
REFERENCE = "docs/reference"
# Pages that are kept nowhere, and what makes them.
MADE = {"docs/errors.md": "tests/docs/errors.py", "tests/ROWS.md": "tests/rows.py"}
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
FENCED = re.compile(r"(^```.*?^```$)", re.M | re.S)
CONF = """\
project = "Coxswain"
copyright = "the Coxswain authors"
extensions = ["myst_parser"]
myst_heading_anchors = 4
root_doc = "docs/README"
exclude_patterns = []
html_theme = "alabaster"
html_theme_options = {"page_width": "1100px", "fixed_sidebar": True}
html_show_sphinx = False
highlight_language = "none"
# Signatures and layouts are quoted; where the highlighter cannot read one it is shown plainly.
suppress_warnings = ["misc.highlighting_failure"]
"""
REDIRECT = """\
<!DOCTYPE html><meta charset="utf-8"><title>Coxswain</title>
<meta http-equiv="refresh" content="0; url=docs/README.html"><a href="docs/README.html">Coxswain</a>
"""


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


class Site:
    def __init__(self, source):
        self.source = source
        self.waiting = [CONTENTS] + sorted(
            os.path.relpath(path, ROOT) for path in glob.glob(os.path.join(ROOT, "docs", "*.md")))
        self.pages = []
        self.headers = set()

    def write(self, path, text):
        there = os.path.join(self.source, path)
        os.makedirs(os.path.dirname(there), exist_ok=True)
        with open(there, "w", encoding="utf-8") as file:
            file.write(text)

    def target(self, page, link, part):
        """What a link of a page leads to here; what it needs is copied."""
        path = os.path.normpath(os.path.join(os.path.dirname(page), link))
        if path in self.headers:
            path = "%s/%s.md" % (REFERENCE, path.replace("/", "-")[:-2])
            return os.path.relpath(path, os.path.dirname(page) or ".")
        if link.endswith(".md"):
            if path not in self.pages and os.path.exists(os.path.join(ROOT, path)):
                self.waiting.append(path)
        elif os.path.isfile(os.path.join(ROOT, path)):
            there = os.path.join(self.source, path)
            os.makedirs(os.path.dirname(there), exist_ok=True)
            shutil.copy(os.path.join(ROOT, path), there)
        return link + (part or "")

    def stage(self, page):
        if page in self.pages:
            return
        self.pages.append(page)

        def replace(match):
            if re.match(r"[a-z]+:", match[2]):
                return match[0]
            return match[1] + self.target(page, match[2], match[3]) + match[4]

        parts = FENCED.split(read(page))
        parts[::2] = [LINK.sub(replace, part) for part in parts[::2]]
        text = "".join(parts)
        self.write(page, re.sub(r"^```output$", "```text", text, flags=re.M))

    def reference(self):
        folder = os.path.join(self.source, REFERENCE)
        subprocess.run([sys.executable, os.path.join(ROOT, "tools", "c_reference.py"), folder],
                       check=True)
        with open(os.path.join(folder, "index.md"), encoding="utf-8") as file:
            self.headers = set(re.findall(r"\[([^\]]+\.h)\]", file.read()))

    def made(self):
        for page, script in MADE.items():
            there = os.path.join(self.source, page)
            os.makedirs(os.path.dirname(there), exist_ok=True)
            subprocess.run([sys.executable, os.path.join(ROOT, script), there], check=True)
            self.pages.append(page)

    def toctrees(self):
        """docs/README.md has the order of the pages that it lists; the others follow."""
        listed = [os.path.normpath(os.path.join("docs", link)) for _, link, _, _ in
                  LINK.findall(read(CONTENTS)) if link.endswith(".md")]
        pages = [page for page in dict.fromkeys(listed + self.pages) if page != CONTENTS]
        lines = ["/" + page[:-3] for page in pages] + ["/%s/index" % REFERENCE]
        self.append(CONTENTS, lines)
        names = sorted(os.path.basename(path)[:-3] for path in
                       glob.glob(os.path.join(self.source, REFERENCE, "*.md")))
        self.append(REFERENCE + "/index.md", [name for name in names if name != "index"])

    def append(self, page, lines):
        with open(os.path.join(self.source, page), "a", encoding="utf-8") as file:
            file.write("\n".join(["", "```{toctree}", ":hidden:", "", *lines, "```", ""]))

    def build(self):
        self.reference()
        while self.waiting:
            self.stage(self.waiting.pop(0))
        self.made()
        self.toctrees()
        self.write("conf.py", CONF)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = os.path.abspath(sys.argv[1])
    if not all(importlib.util.find_spec(name) for name in ("sphinx", "myst_parser")):
        print("skipped: Sphinx with MyST is not installed for %s; sh tools/packages docs" %
              sys.executable)
        sys.exit(77)
    source, html = os.path.join(folder, "source"), os.path.join(folder, "html")
    shutil.rmtree(source, ignore_errors=True)
    Site(source).build()
    done = subprocess.run([sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html",
                           "-d", os.path.join(folder, "doctrees"), source, html], check=False)
    if done.returncode == 0:
        with open(os.path.join(html, "index.html"), "w", encoding="utf-8") as file:
            file.write(REDIRECT)
        print("%s: the site" % os.path.join(html, "index.html"))
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
