"""Studies: many training runs from one file, summarised with paired differences."""
