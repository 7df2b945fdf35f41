#!/usr/bin/python3
"""A Prometheus of Debian that scrapes a group over deaths, and the queries of the dashboard on it.

Usage: prometheus_test.py BIN_DIR SOURCE_DIR [TEST...]
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
from harness import (MODEL, SOURCE_DIR, TIMEOUT, check, expect, finish, fresh_name, prompts_file, run, skip, start,  # pylint: disable=wrong-import-position
                     status_of, test, wait_until)

harness.begin(harness.parser(__doc__))
CONFIGURATION = """
global:
  scrape_interval: 500ms
  scrape_timeout: 500ms
  evaluation_interval: 500ms
rule_files: ["%s"]
scrape_configs:
  - job_name: coxswain
    static_configs: [{targets: ["127.0.0.1:%d"]}]
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Prometheus:
    def __init__(self, target):
        self.folder = tempfile.mkdtemp()
        with open(self.folder + "/prometheus.yml", "w", encoding="utf-8") as file:
            file.write(CONFIGURATION % (os.path.join(SOURCE_DIR, "docs", "prometheus-rules.yml"), target))
        self.port = free_port()
        self.process = subprocess.Popen(
            ["prometheus", "--config.file=%s/prometheus.yml" % self.folder, "--storage.tsdb.path=%s/data" % self.folder,
             "--web.listen-address=127.0.0.1:%d" % self.port], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def query(self, expression):
        """Values by labels; none before Prometheus is ready."""
        try:
            with urllib.request.urlopen("http://127.0.0.1:%d/api/v1/query?%s" % (
                    self.port, urllib.parse.urlencode({"query": expression})), timeout=TIMEOUT) as reply:
                result = json.load(reply)
        except (ConnectionError, urllib.error.URLError):
            check(self.process.poll() is None, "Prometheus has ended")
            return {}
        check(result["status"] == "success", "%s: %s" % (expression, result))
        return {tuple(sorted(one["metric"].items())): float(one["value"][1]) for one in result["data"]["result"]}

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.process.terminate()
        self.process.wait()
        shutil.rmtree(self.folder)


def dashboard():
    with open(os.path.join(SOURCE_DIR, "docs", "grafana-dashboard.json"), encoding="utf-8") as file:
        return [target["expr"] for panel in json.load(file)["panels"] for target in panel["targets"]]


@test
def test_m18_prometheus_scrapes_a_group_over_deaths_and_replacements():
    if not shutil.which("prometheus"):
        skip("no prometheus here (Debian: prometheus)")
    name, port = fresh_name("scraped"), free_port()
    group = start(["run", "--name", name, "-n", "2", "--metrics", str(port), "--model", MODEL, "--on-death",
                   "restart,100/60"])
    pids = {}
    while len(pids) < 2:
        words = group.stdout.readline().split()
        check(words, "the group did not start")
        if words[0] == "rank":
            pids[int(words[1])] = int(words[3])
    with Prometheus(port) as prometheus:
        wait_until(lambda: list(prometheus.query("up").values()) == [1], "the first scrape")
        for deaths in range(1, 4):
            os.kill([rank["pid"] for rank in status_of(name)["ranks"]][deaths % 2], signal.SIGKILL)
            expect(run(["generate", "--name", name, "--file", prompts_file(100)]), 0)
            wait_until(lambda deaths=deaths: list(prometheus.query("coxswain_restarts_total").values()) == [deaths],
                       "death %d" % deaths)
        wait_until(lambda: sum(prometheus.query("coxswain_rank_up").values()) == 2, "both ranks")
        # On a busy machine one may take longer than its 500 ms.
        check(max(prometheus.query("avg_over_time(up[10m])").values()) > 0.5, "most scrapes failed")
        check(sum(prometheus.query("coxswain_rank_deaths_total").values()) == 3, "not three deaths")
        wait_until(lambda: prometheus.query('ALERTS{alertname="CoxswainDeath"}'), "the alert of a death")
        steps = max(prometheus.query("increase(coxswain_completions_total{channel='execute'}[10m])").values())
        check(steps > 10, "%.0f steps" % steps)
        for expression in dashboard():
            filled = expression.replace("$__rate_interval", "1m").replace("$instance", ".*")
            check(prometheus.query(filled), "no value: %s" % filled)
            used = set(re.findall(r"coxswain_[a-z_]+", filled))
            check(used, filled)
    expect(run(["stop", "--name", name]), 0)
    finish(group)


if __name__ == "__main__":
    sys.exit(harness.main())
