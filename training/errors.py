"""The error of training: a mistake in data, settings or files that the user can fix."""

from index.errors import LookalikeError


class TrainingError(LookalikeError):
    """Bad data, bad settings, or a run that cannot continue."""

    kind = "training"
