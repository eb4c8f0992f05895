"""Fields in a row, such that no two rows give the same bytes."""

from __future__ import annotations


def fields(*values: str | bytes) -> bytes:
    """Each value after its length, 8 bytes little-endian; text as UTF-8."""
    encoded = [value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value for value in values]
    return b"".join(len(value).to_bytes(8, "little") + value for value in encoded)
