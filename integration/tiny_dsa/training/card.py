"""The model card: what was trained, how, and how well it answers."""

from __future__ import annotations

from collections.abc import Sequence

from integration.quality.intervals import wilson
from integration.tiny_dsa.training.evaluation import BAR, BAR_LENGTH, BUDGETS, Accuracy, sink_mass
from integration.tiny_dsa.training.model import PATTERN, TinyModel
from integration.tiny_dsa.training.recipe import FURTHEST_POSITION, LENGTHS, SPARSE_LENGTHS, Recipe

_SINKS = {
    (False, False): "without an attention sink",
    (True, False): "with an attention sink",
    (True, True): "with an attention sink, on which a last stage parks all rows that match nothing,",
}
HEADER = """\
---
license: apache-2.0
library_name: vllm
tags: [deepseek-sparse-attention, test-model]
---

# A tiny trained DSA model

{parameters:.2f} M parameters, 3 layers (`{pattern}`: two indexers, the third layer reuses the second selection),
GLM-5.2's architecture (`GlmMoeDsaForCausalLM`) with dense MLPs, 256 words. It answers questions about its own context,
so that a policy which loses the right tokens shows. It knows nothing else. Licence: Apache-2.0, weights and data.

`python -m integration.tiny_dsa.train --export v32 --out DIR` writes the DeepSeek-V3.2 form (the indexer's rotary
dimensions in halves); `--export glm52` the form that lies here.

## Data

Generated on the fly from seed {seed}, nothing else: key-value pairs scattered over filler phrases, then `? key value`
questions (*recall* with many pairs, *needle* with few, *header* right behind `<bos>`, *absent* keys answered `none`),
and segments repeated at the end (*copy*). `integration/tiny_dsa/training/tasks.py`.

## Recipe

`integration/tiny_dsa/training/recipe.py`: an induction circuit {sink} is built in, then everything
trains: dense at length 64 ({steps.short} steps), dense at {shortest} to {longest} with position gaps up to {furthest}
({steps.mixed}), indexers from copies of their heads by KL to attention ({steps.indexer}), sparse with random budgets
at up to {sparse_longest} tokens ({steps.sparse}).
{seconds:.0f} s on {threads} thread(s) of the machine that made this file.
`make train` repeats it for three seeds.

## Answers

Share of right answers with Wilson's 95 % interval, of the bf16 weights, in float32 arithmetic. The bar is {bar} for
recall, needle and copy at {bar_length} tokens.

"""


def card(recipe: Recipe, seconds: float, threads: int, model: TinyModel, found: Sequence[Accuracy]) -> str:
    """The card of a checkpoint, as Markdown."""
    text = HEADER.format(
        parameters=sum(each.numel() for each in model.parameters()) / 1e6,
        pattern=PATTERN,
        seed=recipe.seed,
        sink=_SINKS[recipe.sink, recipe.parking > 0],
        steps=recipe,
        shortest=LENGTHS[0],
        longest=LENGTHS[-1],
        sparse_longest=SPARSE_LENGTHS[-1],
        furthest=FURTHEST_POSITION,
        seconds=seconds,
        threads=threads,
        bar=BAR,
        bar_length=BAR_LENGTH,
    )
    masses = ", ".join(f"{mass:.2f}" for mass in sink_mass(model))
    sinks = (
        f"\nShare of attention on `<bos>` in layers 0, 1, 2 (dense, recall at 512 tokens, rows past 64): {masses}.\n"
    )
    return text + accuracy_table(found) + sinks


def accuracy_table(found: Sequence[Accuracy]) -> str:
    """A row per task and length, a column per budget, as Markdown."""
    names = ["dense" if budget is None else f"K = {budget}" for budget in BUDGETS]
    lines = ["| task | tokens | answers | " + " | ".join(names) + " |", "|---" * (3 + len(names)) + "|"]
    by_case = {(each.task, each.length, each.budget): each for each in found}
    for task, length in dict.fromkeys((each.task, each.length) for each in found):
        row = [by_case[task, length, budget] for budget in BUDGETS]
        lines.append(f"| {task} | {length} | {row[0].total} | " + " | ".join(map(_share, row)) + " |")
    return "\n".join(lines) + "\n"


def _share(accuracy: Accuracy) -> str:
    share = wilson(accuracy.right, accuracy.total)
    return f"{share.value:.3f} ({share.low:.3f} to {share.high:.3f})"
