"""Other processes of this machine."""

import os


def is_running(process: int) -> bool:
    """Whether there is a process of this number, ours or somebody else's."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
