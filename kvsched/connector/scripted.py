"""A connector that says what a script says: for recordings, tests and lessons. It moves no bytes.

Owns: the rules per request. Knows nothing about: content.
Invariants: the same script gives the same answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvsched.connector.base import Lookup
from kvsched.request import Request
from kvsched.step import Load, Save, ScheduledStep, StepResult


class KvRule(NamedTuple):
    """What exists outside for one request.

    external_tokens: a lookup finds its first tokens up to this many, never the last known one.
    asynchronous: whether they are loaded asynchronously.
    keeps_blocks: a normal finish keeps the blocks until a save is reported as sent.
    unknown_lookups: how many lookups first answer "don't know yet"; unknown_after_failure: and after a failed load.
    once: the load can be served only once; later lookups find nothing.
    drops_stale: a preemption hands the blocks over as they are, so stale output is dropped.
    """

    external_tokens: int = 0
    asynchronous: bool = True
    keeps_blocks: bool = False
    unknown_lookups: int = 0
    once: bool = False
    drops_stale: bool = False
    unknown_after_failure: int = 0


class ScriptedConnector:
    """The scheduler's half of a scripted connector. rules: by request id; others find nothing.

    whole_blocks: round what is found down to full blocks, as recordings do.
    loads, saves: every transfer started, in order, for inspection.
    """

    can_load = True

    def __init__(self, rules: Mapping[str, KvRule], block_size: int, *, whole_blocks: bool = True) -> None:
        self.rules = dict(rules)
        self.block_size = block_size
        self.whole_blocks = whole_blocks
        self.loads: list[Load] = []
        self.failed: list[tuple[str, tuple[int, ...]]] = []
        self._unknown: dict[str, int] = {}
        self._served: set[str] = set()
        self._pending: list[Load] = []

    def lookup(self, request: Request, num_local_tokens: int) -> Lookup:
        """What the rule says lies beyond the local hit."""
        rule = self.rules.get(request.id, KvRule())
        unknown = self._unknown.get(request.id, rule.unknown_lookups)
        self._unknown[request.id] = max(0, unknown - 1)
        if unknown:
            return Lookup(None)
        if rule.once and request.id in self._served:
            return Lookup(0)
        num_tokens = min(rule.external_tokens, request.num_tokens - 1)
        if self.whole_blocks:
            num_tokens -= num_tokens % self.block_size
        return Lookup(max(0, num_tokens - num_local_tokens), rule.asynchronous)

    def load_admitted(self, request: Request, block_ids: Sequence[int], num_local: int, num_external: int) -> None:
        """Note the load."""
        if not num_external:
            return
        first, last = num_local // self.block_size, -(-(num_local + num_external) // self.block_size)
        rule = self.rules[request.id]
        blocks = tuple(block_ids[first:last])
        load = Load(request.id, blocks, (b"",) * len(blocks), num_local, num_external, rule.asynchronous)
        self._served.add(request.id)
        self._pending.append(load)

    def step_transfers(self, step: ScheduledStep) -> tuple[tuple[Load, ...], tuple[Save, ...]]:
        """The loads admitted in this pass."""
        loads, self._pending = tuple(self._pending), []
        self.loads += loads
        return loads, ()

    def step_processed(self, step: ScheduledStep, result: StepResult) -> None:
        """Nothing to learn."""

    def request_preempted(self, request: Request, block_ids: Sequence[int]) -> bool:
        """As the rule says."""
        return self.rules.get(request.id, KvRule()).drops_stale

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        """As the rule says."""
        return self.rules.get(request.id, KvRule()).keeps_blocks

    def load_failed(self, request: Request, block_ids: Sequence[int]) -> None:
        """Note the failure."""
        self._unknown[request.id] = self.rules.get(request.id, KvRule()).unknown_after_failure
        self.failed.append((request.id, tuple(block_ids)))
