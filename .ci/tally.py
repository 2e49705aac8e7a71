"""Count the tests of one or more pytest runs; rerun failed multi-process tests once, each alone.

    python .ci/tally.py REPORT [REPORT ...]

A REPORT is what pytest wrote with ``--report-log``. A test marked ``medium`` starts processes, so a busy machine may
fail it. If at most ten tests failed, each of these runs again, alone. One that fails twice fails the run. One that
passes the second time is listed under FLAKY and written to build/flaky.txt with its first output: its cause is unknown,
so it is a defect. Tests in one process never run again. The last line is a pytest summary in which each test counts
once. Exit status: 0 if no test failed, else 1.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MOST_RERUNS = 10
FLAKY = Path("build/flaky.txt")
# pytest-xdist appends the group of a test to its name.
_GROUP = re.compile(r"@[\w./-]+$")
# pytest's exit statuses after which every test has run.
_COMPLETE = (0, 1)


@dataclass
class Report:
    """The outcomes of one pytest run.

    Attributes:
        outcomes: "passed", "failed" or "skipped", by test.
        texts: tracebacks and captured output of failed tests.
        seconds: from the first test's start to the last one's end.
        incomplete: why tests may be missing, or None.
    """

    outcomes: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    incomplete: str | None = None


def read(path: Path) -> Report:
    """Return the outcomes in a report log."""
    if not path.exists():
        return Report(incomplete=f"{path}: not written; pytest did not start")
    report, status, begin, end = Report(), None, float("inf"), 0.0
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if entry["$report_type"] == "SessionFinish":
            status = entry["exitstatus"]
        if entry["$report_type"] == "CollectReport" and entry["outcome"] == "failed":
            report.outcomes[entry["nodeid"]] = "failed"
            report.texts[entry["nodeid"]] = _text(entry)
        if entry["$report_type"] != "TestReport":
            continue
        test = _GROUP.sub("", entry["nodeid"])
        begin, end = min(begin, entry["start"]), max(end, entry["stop"])
        # A test has three phases; a failure of any of them counts, and a skip counts more than an orderly set-up.
        worst = max(report.outcomes.get(test, "passed"), entry["outcome"], key=("passed", "skipped", "failed").index)
        report.outcomes[test] = worst
        if entry["outcome"] == "failed":
            report.texts[test] = report.texts.get(test, "") + _text(entry)
    report.seconds = max(0.0, end - begin)
    if status not in _COMPLETE:
        report.incomplete = f"{path}: pytest ended with {status}; tests may be missing"
    return report


def _text(entry: dict[str, object]) -> str:
    """Return the traceback and the captured output of a failed phase."""
    error = entry.get("longrepr")
    if isinstance(error, dict):
        lines = [
            line
            for part in error.get("reprtraceback", {}).get("reprentries", ())
            for line in part.get("data", {}).get("lines", ())
        ]
        crash = error.get("reprcrash") or {}
        lines.append(f"{crash.get('path')}:{crash.get('lineno')}: {crash.get('message')}")
        error = "\n".join(lines)
    captured = [f"---- {title} ----\n{text}" for title, text in entry.get("sections", ())]  # type: ignore[attr-defined]
    return "\n".join([f"---- {entry.get('when', 'collection')} ----", str(error), *captured, ""])


def rerun(test: str) -> Report:
    """Run one test alone; a test that is not marked ``medium`` is not run."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "medium", f"--report-log={log}", test]
        subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
        return read(log)


def main(paths: Sequence[str], again: Callable[[str], Report] = rerun) -> int:
    """Count, rerun, report; return the exit status."""
    began = time.monotonic()
    reports = [read(Path(path)) for path in paths]
    outcomes = {test: outcome for report in reports for test, outcome in report.outcomes.items()}
    texts = {test: text for report in reports for test, text in report.texts.items()}
    failed = [test for test, outcome in outcomes.items() if outcome == "failed"]
    if len(failed) > MOST_RERUNS:
        print(f"{len(failed)} tests failed, more than {MOST_RERUNS}: none is run again")
    flaky = []
    for test in failed if len(failed) <= MOST_RERUNS else ():
        second = again(test)
        if second.incomplete is None and second.outcomes.get(test) == "passed":
            outcomes[test] = "passed"
            flaky.append(test)
    FLAKY.parent.mkdir(exist_ok=True)
    FLAKY.write_text("".join(f"==== {test}\n{texts.get(test, '')}\n" for test in flaky))
    if flaky:
        print("FLAKY: failed once, passed alone. Find the cause of each before other work.")
        print(FLAKY.read_text())
    count = Counter(outcomes.values())
    for test, outcome in outcomes.items():
        if outcome == "failed":
            print(f"FAILED {test}")
    gaps = [report.incomplete for report in reports if report.incomplete]
    count["error"] = len(gaps)
    print(*(f"ERROR {gap}" for gap in gaps), sep="\n", end="\n" if gaps else "")
    count["rerun"] = len(flaky)
    seconds = sum(report.seconds for report in reports) + time.monotonic() - began
    words = [f"{count[word]} {word}" for word in ("failed", "passed", "skipped", "error", "rerun") if count[word]]
    print(f"==== {', '.join(words) or 'no tests ran'} in {seconds:.2f}s ====", flush=True)
    return 1 if count["failed"] or gaps or not count["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
