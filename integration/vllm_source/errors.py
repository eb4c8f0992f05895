"""The one exception of this folder."""

from __future__ import annotations


class SourceError(Exception):
    """vLLM's sources cannot be had: which version, what is wrong, what to do."""

    def __init__(self, version: str, found: str, cure: str) -> None:
        self.version, self.found, self.cure = version, found, cure
        super().__init__(f"vLLM {version}: {found}; {cure}")

    def __reduce__(self) -> tuple[type[SourceError], tuple[str, str, str]]:
        return SourceError, (self.version, self.found, self.cure)
