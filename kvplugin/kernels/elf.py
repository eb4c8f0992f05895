"""Find the machine code in an ELF file, which is what a cubin is."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

_HEADER = struct.Struct("<40xQ10xHHH")
"""Of a 64-bit little-endian file: offset of the section table, size of an entry, entries, the entry with the names."""

_EXECUTABLE = 0x4


class _Section(NamedTuple):
    """An entry of the section table."""

    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int


_SECTION = struct.Struct("<IIQQQQ")


def code_sections(file: bytes) -> Iterator[bytes]:
    """The contents of the executable sections, in the order of the file's table."""
    table, entry_size, entries, _ = _HEADER.unpack_from(file)
    for position in range(table, table + entry_size * entries, entry_size):
        section = _Section(*_SECTION.unpack_from(file, position))
        if section.flags & _EXECUTABLE:
            yield file[section.offset : section.offset + section.size]
