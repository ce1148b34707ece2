"""Lists on a command line."""

from __future__ import annotations


def words(text: str) -> list[str]:
    """``a,b``"""
    return text.split(",")


def numbers(text: str) -> list[float]:
    """``1,2.5``; argparse says so if it is something else."""
    return [float(word) for word in words(text)]
