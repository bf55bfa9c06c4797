"""Studies: many training runs from one file, summarised with paired differences.

Exports nothing: the command line imports `training.study.cli` at its start, before PyTorch is needed.
"""
