"""The base class of the errors that a user can fix.

    LookalikeError
      index
        ArraysError
        BundleError
        BundleMismatch
        Cancelled
        ClusterError
        CopyStopped
        DependencyMissing
        FilterError
        ImageError
        IndexBuildError
        IndexDamaged
        IndexFileError
        IndexUnavailable
        ItemMissing
        JobMissing
        JobRunning
        LimitExceeded
          TooManyAttributes
          TooManyImages
        LockError
        PluginError
        RankingMissing
        ReindexError
        SearchError
        SnapshotError
        StoreError
          StorageFull
          StoreBusy
          StoreReadOnly
          StoreUnavailable
        VersionConflict
      service
        FetchError
        KeyFileError
          KeyFileUnreadable
          KeyMissing
        NotReady
        Overloaded
        ServiceError
        ServiceUnreachable
        SettingsError
      training
        TrainingError

Any other exception that escapes is a bug.
"""

from typing import ClassVar


class LookalikeError(Exception):
    """The problem, in words for the user who caused it, and its remedy.

    The command line prints it in one line, the service returns it as a problem document.
    """

    kind: ClassVar[str] = "invalid"
    """A stable slug for programs; subclasses set their own."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem} {self.remedy}".strip()
