"""Rows of a benchmark: our value, the value of a peer, and whether their ratio meets a target."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """`ours` and `peer_value` are in `unit`, `ratio` is ours over the peer's, `target` bounds the ratio.

    A row without a target has an empty `target`, and `holds` is None.
    """

    name: str
    ours: float
    peer: str
    peer_value: float
    ratio: float
    unit: str
    target: str
    holds: bool | None


def make_row(
    name: str,
    ours: float,
    peer: str,
    peer_value: float,
    unit: str,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
) -> Row:
    """Creates a row of two measured values and checks their ratio against a maximum or a minimum."""
    ratio, target, holds = ours / peer_value, "", None
    if at_most is not None:
        target, holds = f"<= {at_most:g}", ratio <= at_most
    elif at_least is not None:
        target, holds = f">= {at_least:g}", ratio >= at_least
    return Row(name, ours, peer, peer_value, ratio, unit, target, holds)


def print_table(rows: Sequence[Row]) -> None:
    """Prints the rows as a Markdown table."""
    print("| name | ours | peer | peer's value | ratio | unit | target | holds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for r in rows:
        cells = [r.name, f"{r.ours:.4g}", r.peer, f"{r.peer_value:.4g}", f"{r.ratio:.2f}", r.unit, r.target]
        print(f"| {' | '.join(cells)} | {'' if r.holds is None else 'yes' if r.holds else 'NO'} |")


def write_json(rows: Sequence[Row], file: Path) -> None:
    """Writes the rows as a JSON list."""
    file.write_text(json.dumps([asdict(r) for r in rows], indent=2) + "\n", encoding="utf-8")
