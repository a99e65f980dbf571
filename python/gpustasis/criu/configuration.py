"""CRIU's configuration files: which options one sets, as criu would read it.

The grammar is that of criu(8), CONFIGURATION FILES: an option a line, its long name without dashes,
then its value after blanks or "="; "#" starts a comment. criu ends with exit status 1 where a line
is none of this, and so does a dump that a runtime has asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpustasis.errors import CriuError

# What criu reads by itself; what runc, and crun from 1.26 on, name in their requests. crun takes
# its own file if there is one, else that of runc. Later files win over earlier ones.
DEFAULT_FILE = "/etc/criu/default.conf"
RUNC_FILE = "/etc/criu/runc.conf"
CRUN_FILE = "/etc/criu/crun.conf"


@dataclass(frozen=True, slots=True)
class Option:
    """line: counted from 1. name: the long one, without dashes. value: empty if there is none."""

    line: int
    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.name} {self.value}".strip()


def parse(text: str, origin: str) -> list[Option]:
    """All options in the order of their lines; of one that stands twice, criu takes the last.

    origin: the file's name, for errors. Raises CriuError that names the line criu would choke on.
    """
    options = []
    for number, line in enumerate(text.split("\n"), 1):
        words = _words(line, f"{origin}, line {number}")
        if not words:
            continue
        name, equals, value = words[0].partition("=")
        if name.startswith("-") or not name:
            raise CriuError(
                f"{origin}, line {number}: {words[0]!r} is not the name of an option; "
                "options stand without dashes"
            )
        values = [value, *words[1:]] if equals else words[1:]
        if len(values) > 1:
            raise CriuError(
                f"{origin}, line {number}: {line.strip()!r}: an option has one value at most"
            )
        options.append(Option(number, name, values[0] if values else ""))
    return options


def _words(line: str, where: str) -> list[str]:
    """Words between blanks, up to a comment; a word in double quotes may hold blanks and \\"."""
    words = []
    rest = line.strip()
    while rest and not rest.startswith("#"):
        if rest.startswith('"'):
            end = 1
            while end < len(rest) and (rest[end] != '"' or rest[end - 1] == "\\"):
                end += 1
            if end == len(rest):
                raise CriuError(f"{where}: a quote is not closed")
            words.append(rest[1:end].replace('\\"', '"'))
            rest = rest[end + 1 :].lstrip()
        else:
            word, *others = rest.split(None, 1)
            words.append(word)
            rest = others[0] if others else ""
    return words
