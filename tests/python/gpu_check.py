"""`sh tools/gpu-check` over a build: what needs no device is right, and a failure is said.

Usage: gpu_check.py BUILD OUT. Exit status 77 where no Python here has torch.
"""

import pathlib
import subprocess
import sys

SOURCE = pathlib.Path(__file__).resolve().parents[2]


def check(build, out):
    """The exit status, and of each step its result and detail."""
    command = ["sh", "tools/gpu-check", "--build", build, "--out", out, "--minutes", "16"]
    status = subprocess.run(command, cwd=SOURCE, check=False).returncode
    rows = {}
    for line in (out / "results.md").read_text().splitlines():
        if line.startswith("| ") and not line.startswith("| step "):
            name, result, _, detail = (cell.strip() for cell in line.strip("|").split("|"))
            rows[name] = result, detail
    return status, rows


def main():
    build, out = map(pathlib.Path, sys.argv[1:])
    status, rows = check(build, out / "all")
    assert status == 0, rows
    assert len(rows) == 14, rows
    without_torch = [detail for _, detail in rows.values() if "has no torch" in detail]
    for name, (result, detail) in rows.items():
        needs_device = name.startswith("device memory") or "cuda:0" in name
        if detail not in without_torch:
            assert result in (("passed", "no device") if needs_device else ("passed",)), name
    # What a build lacks fails its steps and the whole, and the rest is not left out.
    (out / "empty").mkdir(exist_ok=True)
    status, broken = check(out / "empty", out / "broken")
    assert status == 1 and list(broken) == list(rows), broken
    assert broken.pop("build")[0] == "FAILED", broken
    assert {result for result, _ in broken.values()} == {"skipped"}, broken
    if without_torch:
        print(f"skipped in part: {without_torch[0]}; `sh tools/torch` installs it from PyPI")
        sys.exit(77)


if __name__ == "__main__":
    main()
