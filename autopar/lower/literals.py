"""Escapes text from outside for generated Python: in literals, comments and docstrings.

Names of classes, parameters and files, the user's lines and everything that a plan says enter
source only through these functions. No such text can end a line or the literal around it. Invisible
characters, and those that change the reading direction, are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


def quoted(text: str) -> str:
    """Returns a literal in double quotes that evaluates to `text`."""
    return f'"{printable(_escaped(text))}"'


def formatted(before: str, variable: str, after: str) -> str:
    """Returns an f-string literal with the value of a variable between two texts."""
    parts = (part.replace("{", "{{").replace("}", "}}") for part in map(_escaped, (before, after)))
    return "f" + '"{}"'.format(printable(f"{{{variable}}}".join(parts)))


def names_text(names: tuple[str, ...]) -> str:
    """Returns one name as a literal, several names as a tuple of literals."""
    return quoted(names[0]) if len(names) == 1 else f"({', '.join(map(quoted, names))})"


def comment(text: str) -> str:
    """Returns a comment of one line."""
    return f"# {printable(text)}".rstrip()


def shortened(text: str, width: int) -> str:
    """Truncates text between two words, with " ..." at the end."""
    text = printable(text)
    if len(text) <= width:
        return text
    ends = (at.start() for at in re.finditer(r"\b", text))
    end = max((at for at in ends if at <= width - 4), default=0)
    return f"{text[: end or width - 4].rstrip()} ..."


def docstring(lines: Iterable[str]) -> str:
    """Returns a literal in triple quotes, which end on a line of their own after several lines."""
    safe = [printable(_escaped(line)) for line in lines]
    return '"""' + "\n".join(safe) + ("\n" if len(safe) > 1 else "") + '"""'


def printable(text: str) -> str:
    """Returns the text on one line, with escapes for unprintable characters."""
    return "".join(sign if sign.isprintable() else _code(sign) for sign in text)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _code(sign: str) -> str:
    """Returns the escape of one character in a literal."""
    return sign.encode("unicode_escape").decode("ascii")
