# SPDX-License-Identifier: Apache-2.0
"""Text for people: what other programs, files and kernels say is shown, never obeyed."""

from __future__ import annotations

_NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
_RAW_BYTES = range(0xDC80, 0xDD00)  # bytes that are no UTF-8, as Python keeps them in a str


def safe(text: object) -> str:
    """`text` on one line, with every character that is not printable written as an escape.

    Such are control characters and so escape sequences, line ends, characters that change the
    direction of writing or have no width, lone surrogates and unassigned code points. A byte that
    is no UTF-8 is shown as that byte. What is printable stays as it is, backslashes too: the
    result is for reading, not for parsing (--json is), and safe(safe(x)) == safe(x).
    """
    found = str(text)
    return found if found.isprintable() else "".join(map(_shown, found))


def safe_lines(text: object) -> str:
    """The same for a text of several lines. Those after the first are indented, so that no text
    from elsewhere can pass for a line of its own."""
    first, *others = str(text).split("\n")
    indented = (line if line.startswith("  ") else f"  {line}" for line in others)
    return "\n".join(map(safe, (first, *indented)))


def _shown(char: str) -> str:
    code = ord(char)
    if char.isprintable():
        return char
    if code in _RAW_BYTES:
        return f"\\x{code - 0xDC00:02x}"
    if code < 0x100:
        return _NAMED.get(char, f"\\x{code:02x}")
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def mib(size: float) -> str:
    """Bytes as "12.0 MiB"."""
    return f"{size / 2**20:.1f} MiB"


def memory_text(plain_bytes: int, cpu_bytes: int) -> str:
    """How much memory of which kind: "12.0 MiB of GPU memory". cpu_bytes: those of plain_bytes that
    are CPU memory."""
    gpu_bytes = plain_bytes - cpu_bytes
    parts = [(gpu_bytes, "GPU memory"), (cpu_bytes, "CPU memory")]
    return " and ".join(f"{mib(size)} of {name}" for size, name in parts if size) or "no memory"


def extra(name: str) -> str:
    """How to install an extra of this package, which is in no index."""
    return (
        f"install the extra \"{name}\": pip install 'WHEEL[{name}]', WHEEL being the file that "
        "gpustasis was installed from"
    )


def plural(count: int, noun: str, ending: str = "s") -> str:
    """Count and noun: "1 image", "2 images"."""
    return f"{count} {noun}{'' if count == 1 else ending}"
