"""An engine with a connector on a `MemoryModel`: scheduler, runner and loads are joined as in the product."""

from __future__ import annotations

from typing import Any

from kvsched.config import SchedulerConfig
from kvsched.connector.base import ConnectorPair
from kvsched.connector.scripted import KvRule, ScriptedConnector
from kvsched.engine import Engine
from kvsched.faults import Fault, FaultPlan
from kvsched.request import SamplingParams
from tests.memory_model import MemoryModel, MemoryRunner, MemoryWorker, expected_output


class Bench:
    """An engine on a memory model; requests get token ids as prompts."""

    def __init__(
        self,
        usable: int,
        rules: dict[str, KvRule],
        *,
        fails: dict[tuple[str, int], int] | None = None,
        eager: bool = True,
        landing: int | None = 1,
        transfer_landing: int | None = None,
        faults: tuple[Fault, ...] = (),
        **settings: object,
    ) -> None:
        config = SchedulerConfig(num_blocks=usable + 1).with_changes(**({"block_size": 4} | settings))
        self.memory = MemoryModel(config.num_blocks, config.block_size)
        self.worker = MemoryWorker(self.memory, self.known_tokens, eager=eager, fails=fails)
        self.connector = ScriptedConnector(rules, config.block_size, whole_blocks=False)
        self.engine = Engine(
            config,
            MemoryRunner(self.memory, self.worker),
            connector=ConnectorPair(self.connector, self.worker, transfer_landing),
            faults=FaultPlan(faults),
            landing=landing,
            max_model_len_is_explicit=False,
        )
        self.prompts: dict[str, list[int]] = {}

    def known_tokens(self, request_id: str) -> list[int]:
        return self.engine._requests[request_id].token_ids  # also of one that has ended while its load is in the air

    def add(self, request_id: str, prompt: list[int], max_tokens: int, **options: object) -> None:
        self.prompts[request_id] = prompt
        self.engine.add_request(request_id, prompt, SamplingParams(max_tokens=max_tokens, **options))

    def wrong(self) -> dict[str, int]:
        """Index of the first wrong token per request that has one."""
        found = {}
        for request_id, prompt in self.prompts.items():
            got = list(self.engine.output(request_id).token_ids)
            right = expected_output(prompt, len(got))
            if got != right:
                found[request_id] = next(i for i, (a, b) in enumerate(zip(got, right, strict=True)) if a != b)
        return found

    def happened(self, kind: str) -> list[Any]:
        """Events of one kind, in order."""
        return [event for event in self.engine.events if event.kind == kind]
