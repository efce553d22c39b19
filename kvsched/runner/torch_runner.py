"""The runner that computes: a transformers model on a paged cache, on the CPU or a GPU.

Owns: `TorchRunner`, its thread and its token buffer; `create_runner`.
Knows nothing about: scheduling, why a step is what it is, when its result is taken.
Invariants: `submit` builds a step's inputs from the step alone and returns; one thread launches steps in the order
submitted. The token buffer on the device has a line per request; a step reads its tokens there, and writes those it
samples there, so that the next step finds them without the host:

        position     0 1 2 3 4 5
        row of r0    p p p p a b      step 1 computes [0, 4) and samples a; step 2 computes [4, 5) and samples b

A step that fails fails all later ones: what they would read was never written. The thread holds no reference to
the runner, so that a forgotten runner is collected, and ends its thread.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsched.connector.base import WorkerConnector
from kvsched.runner.base import Gate
from kvsched.runner.models import DEFAULT_MODEL
from kvsched.runner.torch_attention import DeviceAttention
from kvsched.runner.torch_batch import RequestTable, StepInputs
from kvsched.runner.torch_cache import CacheShape, PagedCache, cache_shape, num_blocks_for_budget
from kvsched.runner.torch_load import LoadedModel, load_model, weights_digest
from kvsched.runner.torch_model import PagedModel
from kvsched.runner.torch_sampler import plan_draws, sample
from kvsched.runner.torch_streams import Streams, choose_device, open_streams
from kvsched.step import NO_TRANSFERS, ScheduledStep, StepResult, Transfers

OnLogits = Callable[[ScheduledStep, tuple[str, ...], Tensor], None]
"""(step, ids of the requests that sample, their logits [n, vocabulary] on the device), in the runner's thread."""

DEFAULT_KV_CACHE_MEMORY = 256 * 2**20


class StepFailed(RuntimeError):
    """A step that cannot be computed because one before it failed."""


class _Job(NamedTuple):
    step: ScheduledStep
    inputs: StepInputs
    gate: Gate | None
    future: Future[StepResult]


class _Worker:
    """What the thread works on: device, model, cache, token buffer."""

    def __init__(self, model: PagedModel, cache: PagedCache, streams: Streams) -> None:
        self.model = model
        self.cache = cache
        self.streams = streams
        self.connector: WorkerConnector | None = None
        self.on_logits: OnLogits | None = None
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.gates: list[Gate] = []
        self._closing = False
        self._tokens = torch.zeros(0, dtype=torch.int64, device=cache.device)
        self._failed: tuple[int, BaseException] | None = None

    def run(self) -> None:
        """The thread: one job after the other, until None; ends when all of them have landed."""
        while (job := self.jobs.get()) is not None:
            if job.gate is not None:
                job.gate.wait()
            try:
                self._run_job(job)
            except Exception as error:  # noqa: BLE001 - handed on to whoever takes the result
                self._fail(job, error)
            del job  # an idle thread must not keep a step's gate and future alive
        self.streams.close()

    def stop(self) -> None:
        """Cancel what has not begun, and let the thread end. May be called twice, from any thread."""
        self._closing = True
        for gate in self.gates:
            gate.open()
        self.jobs.put(None)

    def _run_job(self, job: _Job) -> None:
        if self._closing:
            job.future.set_exception(CancelledError(f"the runner was closed before step {job.step.step} ran"))
            return
        if self._failed is not None:
            number, error = self._failed
            raise StepFailed(f"step {job.step.step} cannot run: step {number} failed ({error})") from error
        with self.streams.computing():
            start = self.streams.mark()
            transfers = NO_TRANSFERS
            if self.connector is not None:
                invalid = self.connector.before_step(job.step)
                transfers = Transfers(invalid_block_ids=invalid) if invalid else NO_TRANSFERS
            tokens = self._compute(job)

            def done(landed: list[int], started: float, finished: float) -> None:
                columns = _columns(job, landed)
                job.future.set_result(StepResult(job.step.step, columns, transfers, started, finished))

            self.streams.land(start, tokens, done, lambda error: self._fail(job, error))

    def _fail(self, job: _Job, error: BaseException) -> None:
        if self._failed is None:
            self._failed = (job.step.step, error)
        job.future.set_exception(error)

    def _compute(self, job: _Job) -> Tensor:
        """Launch a step; [n] sampled tokens on the device."""
        inputs, put = job.inputs, self.streams.put
        self._enter_known(inputs)
        if job.step.is_empty:
            return self._tokens[:0]
        attention = DeviceAttention(inputs.attention, inputs.slots, self.cache, put)
        tokens = self._tokens.index_select(0, put(inputs.places))
        logits = self.model.forward(tokens, put(inputs.positions), attention, put(inputs.sampled_tokens))
        if self.on_logits is not None:
            self.on_logits(job.step, tuple(job.step.request_ids[i] for i in inputs.sampled), logits)
        if not len(inputs.sampled):
            return self._tokens[:0]
        sampled = sample(logits, plan_draws(inputs.sampling, inputs.sampled_positions, put))
        self._tokens.index_copy_(0, put(inputs.sampled_places), sampled)
        return sampled

    def _enter_known(self, inputs: StepInputs) -> None:
        """Make room in the token buffer and write the tokens of requests that join."""
        missing = inputs.buffer_size - self._tokens.shape[0]
        if missing > 0:
            self._tokens = torch.nn.functional.pad(self._tokens, (0, missing))
        if len(inputs.known_places):
            self._tokens.index_copy_(0, self.streams.put(inputs.known_places), self.streams.put(inputs.known_tokens))


def _columns(job: _Job, landed: list[int]) -> tuple[tuple[int, ...], ...]:
    """Sampled tokens per scheduled request."""
    columns: list[tuple[int, ...]] = [()] * len(job.step.request_ids)
    for index, token in zip(job.inputs.sampled.tolist(), landed, strict=True):
        columns[index] = (token,)
    return tuple(columns)


class TorchRunner:
    """A `Runner` on a transformers model; see `create_runner` for the arguments.

    paged: a model ready to run, from another runner on the same device.
    model_name, vocab_size, max_model_len, num_blocks, block_size, device: what came of them. tokenizer: None for
    random models. eos_token_ids: the model's own. cache: the pool's memory, for connectors.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        device: str = "auto",
        num_blocks: int | None = None,
        kv_cache_memory: int | None = None,
        block_size: int = 16,
        max_model_len: int | None = None,
        connector: WorkerConnector | None = None,
        on_logits: OnLogits | None = None,
        pad_to: int = 1,
        pack_weights: bool = True,
        paged: PagedModel | None = None,
    ) -> None:
        self.device = choose_device(device)
        self.model_name = loaded.name
        self.tokenizer = loaded.tokenizer
        self.eos_token_ids = loaded.eos_token_ids
        self.vocab_size: int = loaded.config.vocab_size
        self.block_size = block_size
        self.max_model_len = _longest(loaded, max_model_len)
        model = paged or PagedModel(loaded.model, loaded.name, self.device, pack=pack_weights)
        self._like_this = partial(TorchRunner, loaded, device=device, pad_to=pad_to, paged=model)
        shape = cache_shape(model.config, block_size, model.dtype)
        self.num_blocks = _pool_size(num_blocks, kv_cache_memory, shape)
        self.cache = PagedCache(shape, self.num_blocks, self.device)
        self._table = RequestTable(
            block_size,
            self.max_model_len,
            self.vocab_size,
            pad_to=pad_to,
            max_group_blocks=_GATHER_BYTES[self.device.type] * shape.num_layers // shape.block_bytes,
        )
        self._worker = _Worker(model, self.cache, open_streams(self.device))
        self._worker.connector, self._worker.on_logits = connector, on_logits
        self._thread = threading.Thread(target=self._worker.run, name="kvsched-runner", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._worker.stop)

    @property
    def prompt_vocab_size(self) -> int:
        """The model looks tokens up: see `Runner`."""
        return self.vocab_size

    def fresh(
        self, *, num_blocks: int | None = None, block_size: int | None = None, max_model_len: int | None = None
    ) -> TorchRunner:
        """Another runner on the same weights, with a cache of its own and without a connector; None: as here."""
        return self._like_this(
            num_blocks=num_blocks or self.num_blocks,
            block_size=block_size or self.block_size,
            max_model_len=max_model_len or self.max_model_len,
        )

    def attach_connector(self, connector: WorkerConnector) -> None:
        """The connector that is called before each step, if it could not be given at once (it needs `cache`)."""
        self._worker.connector = connector

    def submit(self, step: ScheduledStep, gate: Gate | None = None) -> Future[StepResult]:
        """See `Runner.submit`. Raises ValueError for a step that does not fit the requests in the runner's hands."""
        if not self._finalizer.alive:
            raise RuntimeError("the runner is closed; make a new one")
        inputs = self._table.build(step)
        future: Future[StepResult] = Future()
        future.set_running_or_notify_cancel()
        if gate is not None:
            self._worker.gates[:] = [g for g in self._worker.gates if not g.is_open]
            self._worker.gates.append(gate)
        self._worker.jobs.put(_Job(step, inputs, gate, future))
        return future

    def now(self) -> float:
        """Seconds since the runner was made."""
        return self._worker.streams.now()

    def advance(self, to: float) -> None:
        """Real time passes by itself."""

    def weights_id(self) -> str:
        """Identifies architecture, weights and dtype (hex). Reads all weights; equal to `LoadedModel.weights_id`."""
        return weights_digest(self._worker.model.module)

    def close(self) -> None:
        """Cancel what has not begun, wait for what has, end the threads."""
        self._finalizer()
        self._thread.join()


_GATHER_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
"""Most bytes of one layer's keys and values that are gathered for one call of attention over decode rows."""


def create_runner(
    model: str | LoadedModel = DEFAULT_MODEL, *, dtype: str = "float32", seed: int = 0, **options: Any
) -> TorchRunner:
    """Load a model and make a runner for it.

    model, dtype, seed: see `load_model`; or a LoadedModel, which is left as it is.
    device: "auto", "cpu" or "cuda". block_size: tokens per block.
    num_blocks: blocks in the pool, the null block included; or kv_cache_memory: bytes for it (default 256 MiB).
    max_model_len: longest sequence (default: what the model can).
    connector: its `before_step` is called in compute order. on_logits: sees the logits of every step.
    pad_to: pad each step to a multiple of so many tokens. pack_weights: the faster layout of weights on the CPU.

    Raises ModelUnavailable for a model that is not here or cannot be served, ValueError for other bad input.
    """
    loaded = model if isinstance(model, LoadedModel) else load_model(model, dtype=dtype, seed=seed)
    return TorchRunner(loaded, **options)


def _longest(loaded: LoadedModel, max_model_len: int | None) -> int:
    if max_model_len is None:
        return loaded.max_positions
    if not 1 <= max_model_len <= loaded.max_positions:
        raise ValueError(f"max_model_len is {max_model_len}; {loaded.name} can do 1 to {loaded.max_positions}")
    return max_model_len


def _pool_size(num_blocks: int | None, kv_cache_memory: int | None, shape: CacheShape) -> int:
    if num_blocks is not None and kv_cache_memory is not None:
        raise ValueError("num_blocks and kv_cache_memory both size the pool; give one of them")
    if num_blocks is not None:
        return num_blocks
    return num_blocks_for_budget(shape, DEFAULT_KV_CACHE_MEMORY if kv_cache_memory is None else kv_cache_memory)
