"""Python threads that run a kernel side by side on the rows of one call.

numba's own threading layers are not used: they belong to the whole process, and abort it when two threads launch at
once (``workqueue``) or when a forked child launches again (GNU OpenMP). A kernel that releases the GIL needs neither.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

SLOTS_PER_THREAD = 32_768
"""Index slots per thread below which waking one more costs more than it saves."""


class Crew:
    """Owner of the worker threads, which start when they are first needed."""

    def __init__(self) -> None:
        self._executor = self._new_executor()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._replace_executor)

    def run(self, jobs: Sequence[Callable[[], object]]) -> None:
        """Run the first job on the calling thread and the others on workers.

        The jobs draw from one supply of work, so whatever the first leaves undone is in progress elsewhere: a worker
        that did not wake up in time is called off.
        """
        others = [self._executor.submit(job) for job in jobs[1:]]
        jobs[0]()
        for other in others:
            if not other.cancel():
                other.result()

    def _replace_executor(self) -> None:
        # Threads do not survive a fork; the executor would wait for them for ever.
        self._executor = self._new_executor()

    @staticmethod
    def _new_executor() -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="kvplugin-rows")


CREW = Crew()


def thread_count(rows: int, width: int) -> int:
    """Threads worth using for a call: no more than torch uses, nor than the cores this thread may run on.

    A thread pinned to one core, as vLLM pins its CPU workers, passes its pin on to threads it starts.
    """
    worthwhile = rows * width // SLOTS_PER_THREAD
    if worthwhile < 2:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(worthwhile, torch.get_num_threads(), cores)
