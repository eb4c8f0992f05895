"""Show people what a starting server does."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console

from integration.server import Progress
from integration.server_log import Stage


class StartupView:
    """Prints each stage once, as a line; a terminal also gets a spinner with the running time."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._shown: Stage | None = None
        self._spinner = console.status(title)

    def __enter__(self) -> Self:
        self._spinner.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the spinner off the terminal."""
        self._spinner.stop()

    def __call__(self, progress: Progress) -> None:
        """Show the stage and how long the server has been starting."""
        if progress.stage is not self._shown:
            self._console.print(f"{self._title}  {progress.elapsed_s:5.1f} s  {progress.stage}", highlight=False)
            self._shown = progress.stage
        self._spinner.update(f"{self._title}: {progress.stage}, {progress.elapsed_s:.0f} s")
