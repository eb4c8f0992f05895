"""Model runners, as far as the plugin reads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from batches import Batch
    from rig import Rig


class RunnerV2:
    """vLLM's model runner V2: requests lie in slots, in no order."""

    def __init__(self, batch: Batch) -> None:
        prompts = np.zeros(100, dtype=np.int32)
        for request in batch.requests:
            prompts[request.slot] = request.prompt
        names = {request.slot: f"request-{request.key}" for request in batch.requests}
        self.req_states = SimpleNamespace(prompt_len=SimpleNamespace(np=prompts), index_to_req_id=names)


class RunnerV1:
    """vLLM's first model runner: requests lie in the order of the batch."""

    def __init__(self, batch: Batch) -> None:
        self.input_batch = SimpleNamespace(
            num_reqs=len(batch.requests),
            num_prompt_tokens=np.array([request.prompt for request in batch.requests] + [7] * 3, dtype=np.int32),
            req_ids=[f"request-{request.key}" for request in batch.requests],
        )


def tell_prompts(rig: Rig, batch: Batch, runner: type[Any] = RunnerV2) -> None:
    """Let the plugin know the requests as it does in a worker."""
    from kvplugin.vllm.gpu.requests import RunnerRequests

    rig.runner = runner(batch)
    rig.engine.source = RunnerRequests(rig.runner, None)
