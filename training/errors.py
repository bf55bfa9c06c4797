"""The error of training: a mistake in data, settings or files that the engineer can mend."""

from index.errors import LookalikeError


class TrainingError(LookalikeError):
    """Bad data, bad settings, or a run that cannot go on."""

    kind = "training"
