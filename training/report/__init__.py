"""One self-contained page about a training run: its figures, its worst answers as photos, the space it learned."""

from training.report.page import write_report

__all__ = ["write_report"]
