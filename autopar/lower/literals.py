"""Text from outside in generated Python: as a literal, in a comment, in a docstring.

Names of classes, parameters and files, the user's lines and all that a plan says get into source
through these functions only. None of them can end a line or the literal that it stands in.
Characters that are not to be seen, or turn the order in which a line is read, are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


def quoted(text: str) -> str:
    """A literal in double quotes that reads back as `text`."""
    return f'"{printable(_escaped(text))}"'


def formatted(before: str, variable: str, after: str) -> str:
    """A literal that puts the value of a variable between two texts."""
    parts = (part.replace("{", "{{").replace("}", "}}") for part in map(_escaped, (before, after)))
    return "f" + '"{}"'.format(printable(f"{{{variable}}}".join(parts)))


def names_text(names: tuple[str, ...]) -> str:
    """One name as a literal, several as a tuple of literals."""
    return quoted(names[0]) if len(names) == 1 else f"({', '.join(map(quoted, names))})"


def comment(text: str) -> str:
    """A comment of one line."""
    return f"# {printable(text)}".rstrip()


def shortened(text: str, width: int) -> str:
    """The text cut to a width between two words, with " ..." where something is left out."""
    text = printable(text)
    if len(text) <= width:
        return text
    ends = (at.start() for at in re.finditer(r"\b", text))
    end = max((at for at in ends if at <= width - 4), default=0)
    return f"{text[: end or width - 4].rstrip()} ..."


def docstring(lines: Iterable[str]) -> str:
    """A literal in three quotes, the closing ones on a line of their own behind several lines."""
    safe = [printable(_escaped(line)) for line in lines]
    return '"""' + "\n".join(safe) + ("\n" if len(safe) > 1 else "") + '"""'


def printable(text: str) -> str:
    """The text on one line, with escapes in place of what is not printed."""
    return "".join(sign if sign.isprintable() else _code(sign) for sign in text)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _code(sign: str) -> str:
    """The escape of one character in a literal."""
    return sign.encode("unicode_escape").decode("ascii")
