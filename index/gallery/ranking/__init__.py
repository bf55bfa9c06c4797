"""Applies rankings: rules that act on windows of candidates, whichever engine finds them."""
