"""The model's own greedy tokens, by transformers' `generate`, and the engine's logits beside it.

Owns: `greedy_references`, `GapProbe`. Knows nothing about: schedulers, caches, how runs are planned.
Invariants: each prompt is generated alone, unpadded, on unchanged weights, so that nothing of ours can colour it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvsched.experiment.exactness import LogitGap, Reference
from kvsched.runner.torch_load import LoadedModel
from kvsched.step import ScheduledStep


@torch.inference_mode()
def greedy_references(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], max_tokens: int
) -> tuple[list[Reference], list[Tensor]]:
    """`max_tokens` greedy tokens per prompt, end-of-sequence tokens included and passed over.

    Returns the references, and per prompt the logits [max_tokens, vocabulary] (float32, CPU) they were taken from.
    """
    references, all_logits = [], []
    for prompt in prompts:
        output = loaded.model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.cat([row.float() for row in output.logits])
        top = logits.topk(2).values
        tokens = tuple(output.sequences[0, len(prompt) :].tolist())
        references.append(Reference(tuple(prompt), tokens, tuple((top[:, 0] - top[:, 1]).tolist())))
        all_logits.append(logits)
    return references, all_logits


class GapProbe:
    """Keeps the largest difference between an engine's logits and the reference's in a run: give it to a runner as
    `on_logits`. A request that has left the reference's tokens is no longer looked at behind that point.

    references, logits: by request id.
    """

    def __init__(self, references: Mapping[str, Reference], logits: Mapping[str, Tensor], gap: LogitGap) -> None:
        self._references = references
        self._logits = logits
        self._gap = gap
        self._left_at: dict[str, int] = {}

    def __call__(self, step: ScheduledStep, request_ids: tuple[str, ...], logits: Tensor) -> None:
        ends = {
            request_id: start + count
            for request_id, start, count in zip(
                step.request_ids, step.num_computed_tokens, step.num_scheduled_tokens, strict=True
            )
        }
        for request_id, row in zip(request_ids, logits.float().cpu(), strict=True):
            reference = self._references.get(request_id)
            if reference is None:
                continue
            index = ends[request_id] - len(reference.prompt_token_ids)
            if index > self._left_at.get(request_id, len(reference.token_ids) - 1):
                continue
            difference = (row - self._logits[request_id][index]).abs().max().item()
            self._gap.largest = max(self._gap.largest, difference)
            if int(row.argmax()) != reference.token_ids[index]:
                self._left_at[request_id] = index
