"""The exception tree that the docstring of index/errors.py shows."""

import ast
from collections.abc import Iterator
from pathlib import Path

import index.errors
from index.errors import LookalikeError

ROOT = Path(__file__).parents[2]


def defined_classes(package: str) -> Iterator[tuple[str, set[str]]]:
    """Yields the name and the base classes of every class of a package, without importing its engines."""
    for file in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield node.name, {ast.unparse(base).rpartition(".")[2] for base in node.bases}


def tree_of(name: str, classes: dict[str, list[tuple[str, set[str]]]], indent: str) -> list[str]:
    """Returns the lines of the tree below an error; those of each package below its name at the top level."""
    lines = []
    for package, defined in classes.items():
        children = sorted(child for child, bases in defined if name in bases)
        if name == "LookalikeError" and children:
            lines.append(f"{indent}{package}")
        inner = f"{indent}  " if name == "LookalikeError" else indent
        for child in children:
            lines += [f"{inner}{child}", *tree_of(child, classes, f"{inner}  ")]
    return lines


def test_the_docstring_shows_every_error() -> None:
    classes = {package: list(defined_classes(package)) for package in ("index", "service", "training")}
    tree = "\n".join(["    LookalikeError", *tree_of("LookalikeError", classes, " " * 6)])
    assert (index.errors.__doc__ or "").split("\n\n")[1] == tree


def test_an_error_prints_its_problem_and_its_remedy() -> None:
    error = LookalikeError("No photo at mug.jpg.", "Check the path.")
    assert (str(error), error.problem, error.remedy) == (
        "No photo at mug.jpg. Check the path.",
        "No photo at mug.jpg.",
        "Check the path.",
    )
    assert str(LookalikeError("No photo at mug.jpg.")) == "No photo at mug.jpg."
