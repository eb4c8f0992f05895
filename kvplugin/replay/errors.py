"""What decode replay raises beside :class:`~kvplugin.errors.ArgumentError`."""

from __future__ import annotations

from kvplugin.errors import ArgumentError, KvpluginError


class IdentityError(ArgumentError):
    """The cache is not what its metadata says: wrong positions, shared pages, an altered prefix.

    The tensors are well formed, so this is a finding about the engine, not about the file that carries them.
    """


class CaptureFileError(KvpluginError):
    """A capture folder cannot be used; one line says which file, what was found and what is allowed.

    Attributes:
        where: file, and the entry inside it.
        found: what is there.
        cure: what would be accepted.
    """

    def __init__(self, where: str, found: str, cure: str) -> None:
        self.where, self.found, self.cure = where, found, cure
        super().__init__(f"{where}: {found}; {cure}")

    def __reduce__(self) -> tuple[type[CaptureFileError], tuple[str, str, str]]:
        return CaptureFileError, (self.where, self.found, self.cure)


class MissingExtra(KvpluginError):
    """A package that only this part of replay needs is not installed.

    Attributes:
        package: the missing package.
        purpose: what it is for.
    """

    def __init__(self, package: str, purpose: str) -> None:
        self.package, self.purpose = package, purpose
        super().__init__(
            f"kvplugin replay: {package} is not installed; {purpose} needs it; pip install 'kvplugin[replay]'"
        )

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str]]:
        return MissingExtra, (self.package, self.purpose)
