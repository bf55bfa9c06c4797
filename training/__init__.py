"""Trains the embedding model, measures it and exports it as a bundle; the only package with PyTorch.

Exports nothing, so that importing it is cheap; `training.data`, `training.backbones`, `training.losses` and
`training.report` export what other packages may use.
"""

import os

# PyTorch's threads wait for each other in a loop, by default for milliseconds. Where the processes that decode photos
# need the same cores, that takes a fifth of the speed (12-MP photos, 2 cores); a short loop costs nothing measurable.
# Read when PyTorch is loaded, so it has no effect on a program that imported it before.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
