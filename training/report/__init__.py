"""Self-contained HTML pages: about a training run, and about a study."""

from training.report.page import write_report
from training.report.study_page import write_study_page

__all__ = ["write_report", "write_study_page"]
