"""Every greedy token against ``transformers``, whose attention, masks and top-k are not ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from integration.engine.conftest import Checkpoint
from integration.engine.runs import MERGE, answers, token_prompts
from integration.engine.transformers_oracle import Oracle, SelectTokens, learned, merged, windowed

LOGPROB = 5e-3
# Structure moves the cut to where scores lie closer: a near-tie that fp32 noise decides costs a few 1e-3 more.
MERGE_LOGPROB = 2e-2

ONLY = {
    "mode": "topology_only",
    "sink_tokens": 1,
    "local_tokens": 12,
    "fill": "none",
}


@pytest.mark.parametrize(
    ("policy", "select", "index_topk", "allowed"),
    [
        pytest.param(None, learned, 1024, LOGPROB, id="dense"),
        pytest.param(None, learned, 64, LOGPROB, id="learned"),
        pytest.param(MERGE, merged(sink=4, local=12), 64, MERGE_LOGPROB, id="merge"),
        pytest.param(ONLY, windowed(sink=1, local=12), 64, LOGPROB, id="one sink and a window only"),
    ],
)
def test_greedy_tokens(
    checkpoint: Checkpoint, policy: dict[str, Any] | None, select: SelectTokens, index_topk: int, allowed: float
) -> None:
    model, prompts = checkpoint("glm52"), token_prompts()
    found = answers(model, policy, prompts=prompts, hf_overrides={"index_topk": index_topk})
    oracle = Oracle(model, select, index_topk)
    for request, (prompt, answer) in enumerate(zip(prompts, found, strict=True)):
        expected = oracle.log_probs(prompt, answer.tokens)
        assert expected.argmax(-1).tolist() == list(answer.tokens), f"request {request}"
        chosen = expected.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        worst = float((chosen - torch.tensor(answer.logprobs, dtype=torch.float64)).abs().max())
        assert worst <= allowed, f"request {request}: log-probs differ by {worst:.2e}, allowed {allowed:.0e}"
