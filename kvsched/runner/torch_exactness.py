"""A model under test: its references, and a fresh runner per run.

Owns: `ModelUnderTest`. Knows nothing about: plans, comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch

from kvsched.config import SchedulerConfig
from kvsched.connector.base import ConnectorPair
from kvsched.connector.disk import DiskTier
from kvsched.connector.host import HostTier
from kvsched.engine import chat_text
from kvsched.experiment.exactness import LogitGap
from kvsched.runner.torch_load import load_model
from kvsched.runner.torch_model import PagedModel
from kvsched.runner.torch_reference import GapProbe, greedy_references
from kvsched.runner.torch_runner import TorchRunner, create_runner
from kvsched.runner.torch_tiers import open_tier


class ModelUnderTest:
    """A model with the greedy continuations of some prompts.

    prompts: texts, put through the chat template; or token ids for a model without a tokenizer.
    """

    def __init__(self, model: str, prompts: Sequence[str | Sequence[int]], max_tokens: int) -> None:
        self._loaded = load_model(model)
        self._paged = PagedModel(self._loaded.model, self._loaded.name, torch.device("cpu"))
        encoded = [self._encode(prompt) for prompt in prompts]
        self.references, logits = greedy_references(self._loaded, encoded, max_tokens)
        ids = [f"r{i}" for i in range(len(encoded))]
        self._by_id = dict(zip(ids, self.references, strict=True))
        self._logits = dict(zip(ids, logits, strict=True))
        self._folder = TemporaryDirectory(prefix="kvsched-exactness-")

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        tokenizer = self._loaded.require_tokenizer()
        return list(tokenizer.encode(chat_text(tokenizer, [{"role": "user", "content": prompt}])))

    def make_runner(
        self, config: SchedulerConfig, gap: LogitGap, settings: Mapping[str, Any]
    ) -> tuple[TorchRunner, ConnectorPair | None]:
        """A runner with a pool of the config's size, on the CPU, whose cache starts full of NaN; with a host tier
        if the settings name a connector ("asynchronous" or "synchronous" loads), or a tier on disk ("disk") which
        the runs share one after the other."""
        runner = create_runner(
            self._loaded,
            device="cpu",
            paged=self._paged,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            on_logits=GapProbe(self._by_id, self._logits, gap),
        )
        runner.cache.poison()
        kind = settings.get("connector")
        if kind is None:
            return runner, None
        if kind == "disk":
            return runner, open_tier(DiskTier(folder=self._folder.name, capacity_bytes=2**28), runner)
        return runner, open_tier(HostTier(asynchronous=kind == "asynchronous"), runner)
