"""One self-contained page about a training run: its figures, its worst queries as photos, the embedding space."""

from training.report.page import write_report

__all__ = ["write_report"]
