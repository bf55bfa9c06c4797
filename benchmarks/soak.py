"""Runs a service for a long time under too many searches, kills, full disks and attacks, and checks every answer.

The load is open: searches by photos of about 100 KB arrive at a multiple of the capacity that is measured first,
whether or not earlier ones are answered. At the same time other clients write, count, walk over pages and attack, the
service and its jobs are killed, bundles are switched and the disk runs full: the mix of tests/end_to_end/test_chaos.py.
All of it runs on the same cores. What is measured is appended to a file of JSON lines as it comes.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the mix is shared with the tests
from tests.support.chaos import ChaosOptions, run_chaos

Record = dict[str, Any]
MIB = 1 << 20
QUICK_SECONDS = 12.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="some seconds, to show that it works")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long to run (default: 30)")
    parser.add_argument("--load", type=float, default=2.0, help="searches as a multiple of the capacity (default: 2)")
    parser.add_argument("--workers", type=int, default=1, help="processes of the service (default: 1)")
    parser.add_argument("--memory", type=int, default=1024, metavar="MIB", help="limit of the service (default: 1024)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="repeats the choices of a run")
    parser.add_argument("--records", type=Path, metavar="FILE", help="append what is measured to FILE as it comes")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="print the tables of such a file, and run nothing")
    arguments = parser.parse_args()
    if arguments.summary:
        lines = arguments.summary.read_text(encoding="utf-8").splitlines()
        sys.exit(print_tables([json.loads(line) for line in lines if line.endswith("}")]))  # a kill may cut the last
    sys.exit(print_tables(measure(arguments)))


def measure(arguments: argparse.Namespace) -> list[Record]:
    options = ChaosOptions(
        seed=arguments.seed,
        seconds=QUICK_SECONDS if arguments.quick else 60 * arguments.minutes,
        workers=arguments.workers,
        max_memory=arguments.memory * MIB,
        kill_seconds=(4.0, 6.0) if arguments.quick else (20.0, 60.0),
        load=arguments.load,
        record_seconds=QUICK_SECONDS / 2 if arguments.quick else 60.0,
    )
    records: list[Record] = []

    def add(record: Record) -> None:
        records.append(record)
        if arguments.records:
            with arguments.records.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        if record["record"] == "interval":
            print(interval_line(record), file=sys.stderr, flush=True)

    print(f"seed {options.seed}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="lookalike-bench-") as folder:
        run_chaos(options, Path(folder), add)
    return records


def print_tables(records: Sequence[Record]) -> int:
    """Prints the intervals and the totals as Markdown tables; returns 1 if an invariant does not hold."""
    intervals = [record for record in records if record["record"] == "interval"]
    start = next((record for record in records if record["record"] == "start"), None)
    end = next((record for record in records if record["record"] == "end"), None)
    print_rows(["until, s", "accepted", "refused", "p50, ms", "p99, ms", "kills", "writes", "wrong", "memory, MiB"])
    for record in intervals:
        print(interval_line(record))
    print()
    print_rows(["name", "value"])
    for name, value in totals(intervals, start, end):
        print(f"| {name} | {value} |")
    last = end or (intervals[-1] if intervals else {})
    for example in last.get("examples", ()):
        print(f"\n{example}")
    return int(bool(last.get("violations")))


def print_rows(names: Sequence[str]) -> None:
    print(f"| {' | '.join(names)} |\n|{' --- |' * len(names)}")


def interval_line(record: Record) -> str:
    kills = sum(count for name, count in record["faults"].items() if name in ("service killed", "worker killed"))
    wrong = sum(record["violations"].values())
    cells = [record["seconds"], record["accepted"], record["refused"], record["p50"], record["p99"], kills]
    cells += [record["acknowledged"], wrong, in_mib(record["memory"])]
    return f"| {' | '.join('' if cell is None else str(cell) for cell in cells)} |"


def totals(intervals: Sequence[Record], start: Record | None, end: Record | None) -> Iterable[tuple[str, str]]:
    """Yields the rows of the second table; those of an interrupted run end with its last interval."""
    if start:
        yield "capacity, searches/s", f"{start['capacity']:,}; sent {start['rate']:,}"
    requests: dict[str, Counter[str]] = {}
    faults: Counter[str] = Counter()
    for record in intervals:
        faults.update(record["faults"])
        for kind, counts in record["requests"].items():
            requests.setdefault(kind, Counter()).update(counts)
    for kind, counts in sorted(requests.items()):
        yield f"requests: {kind}", ", ".join(f"{counts[status]:,} {status}" for status in sorted(counts))
    accepted, refused = (sum(record[name] for record in intervals) for name in ("accepted", "refused"))
    yield "searches refused", f"{refused / max(1, accepted + refused):.1%} of {accepted + refused:,}"
    for name in ("p50", "p99"):
        yield f"accepted searches, {name}, ms", middle_and_worst([it[name] for it in intervals if it[name] is not None])
    yield "slowest /healthz, ms", f"{1000 * max((it['health'] or 0 for it in intervals), default=0):.0f}"
    for name, count in sorted(faults.items()):
        yield f"fault: {name}", f"{count:,}"
    yield "ready after a kill, s", middle_and_worst([one for record in intervals for one in record["recoveries"]])
    last = end or (intervals[-1] if intervals else None)
    if last:
        lost = last["violations"].get("lost write", 0)
        yield "writes", f"{last['acknowledged']:,} acknowledged, {last['unknown']:,} interrupted, {lost:,} lost"
        wrong = ", ".join(f"{count:,} {kind}" for kind, count in sorted(last["violations"].items()))
        yield "invariants that do not hold", wrong or "none"
    if start and last:
        memory = [record["memory"] for record in intervals if record["memory"]]
        sizes = {"start": start["memory"], "median": statistics.median(memory or [0]), "peak": last["peak_memory"]}
        if end:
            sizes["end"] = end["memory"]
        described = ", ".join(f"{name} {in_mib(size)}" for name, size in sizes.items())
        yield "memory of the service, MiB", f"{described}; limit {in_mib(start['max_memory'])}"
    if start and end:
        yield "open files of the service", f"start {start['open_files']}, end {end['open_files']}"
        yield "faults found by verify", str(end["faults"])


def middle_and_worst(values: Sequence[float]) -> str:
    return f"median {statistics.median(values):.4g}, worst {max(values):.4g}" if values else "none"


def in_mib(size: float | None) -> int | None:
    return None if size is None else round(size / MIB)


if __name__ == "__main__":
    main()
