"""What can go wrong when dashboards are built or drawn."""

from __future__ import annotations

from kvplugin.errors import KvpluginError


class MissingDashboardsExtra(KvpluginError):
    """A package that only dashboards need is not installed.

    Attributes:
        package: the missing package.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        super().__init__(f"kvplugin dashboards: {package} is not installed; pip install 'kvplugin[dashboards]'")

    def __reduce__(self) -> tuple[type[MissingDashboardsExtra], tuple[str]]:
        return MissingDashboardsExtra, (self.package,)


class PrometheusError(KvpluginError):
    """Prometheus cannot be asked, or refuses what it is asked.

    Attributes:
        url: its address.
        found: what happened.
        cure: what would help.
    """

    def __init__(self, url: str, found: str, cure: str) -> None:
        self.url, self.found, self.cure = url, found, cure
        super().__init__(f"{url}: {found}; {cure}")

    def __reduce__(self) -> tuple[type[PrometheusError], tuple[str, str, str]]:
        return PrometheusError, (self.url, self.found, self.cure)
