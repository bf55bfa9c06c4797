"""Finds the Chromium that tests and recordings drive."""

import shutil

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser() -> str | None:
    """Returns the path of Chromium or Chrome, or None where neither is installed."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)
