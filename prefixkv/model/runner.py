"""Runs the model over packed chunks. Owns the pool's tensors and the model's attachment, nothing of who asked."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from prefixkv.attention.base import AttentionBackend
from prefixkv.attention.cpu import NumbaBackend
from prefixkv.attention.select import BackendChoice, prepare_backends, select_backend
from prefixkv.cache.spec import KVCacheSpec
from prefixkv.config import CacheConfig
from prefixkv.errors import ConfigError, UnsupportedModel
from prefixkv.kernels import readiness
from prefixkv.kv.calibration import PoolCalibration
from prefixkv.kv.pages import Arena
from prefixkv.kv.storage import KVStorage, plan_num_blocks
from prefixkv.model.batch import Chunk, ForwardBatch
from prefixkv.model.fused import FusedDecoder, NotFusable
from prefixkv.model.hook import Attachment, PoolStep, active_step
from prefixkv.model.inspect import ModelShape, observe, refuse_unsupported
from prefixkv.model.load import LoadedModel

__all__ = ["ModelRunner"]

logger = logging.getLogger("prefixkv.model")

_SELF_TEST_TOKENS = 24
_TOLERANCE = {"float32": 3e-4, "float16": 0.003, "bfloat16": 0.02}
"""Most that self-test logits may differ, as a share of the stock logits' spread (standard deviation), for one layer.

Rounding grows with the root of the number of layers. Measured, 15 kinds of small models and the demo: a third or less.
"""

_Proof = tuple[list[list[int]], torch.Tensor]
"""Prompts of the self-test and [T, V] the stock model's logits of all their tokens."""


class ModelRunner:
    """Executes steps. Only the engine thread calls it once it is built.

    Attributes:
        spec: Shape of the cache.
        num_blocks: Blocks of the pool.
        storage: The pool.
        backend: Name of the attention backend.
        refusals: Name of a better backend to why it was refused.
        decoder_refusal: Why it is not the fused one, or None.
        step_refusal: Why compiled kernels do not run its small steps, or None.
        self_test_error: What the self-test measured, in the unit of its tolerance.
        calibration: What the pool was built with besides its format, or None.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attachment: Attachment,
        shape: ModelShape,
        storage: KVStorage,
        choice: BackendChoice,
        calibration: PoolCalibration | None = None,
    ) -> None:
        """Put the parts together; :meth:`build` makes them."""
        self.calibration = calibration
        self.spec = storage.spec
        self.num_blocks = storage.num_blocks
        self.storage = storage
        self.backend = choice.backend.name
        self.refusals = choice.refusals
        self.decoder_refusal: str | None = None
        self.step_refusal: str | None = "the kernels are not ready"
        self.self_test_error = 0.0
        self._fused: FusedDecoder | None = None
        self._model = model
        self._attachment = attachment
        self._shape = shape
        self._backend: AttentionBackend = choice.backend
        self._awaits_backend = readiness.is_waiting()
        self._proof: _Proof | None = None
        self._prompts: list[list[int]] = []
        self._stock_is_proved = False

    @classmethod
    def build(cls, loaded: LoadedModel, cache: CacheConfig, pages: Arena | None = None) -> ModelRunner:
        """Inspect a model, allocate its pool, attach to it and prove that both agree.

        On failure the model is as it was.

        Args:
            loaded: The model.
            cache: Of the pool.
            pages: From :func:`~prefixkv.model.fused.reserve_pages` for this model.

        Raises:
            UnsupportedModel: If the model cannot be served exactly.
            ConfigError: If not even one block fits in the memory, the memory cannot be had, or the calibration is
                malformed or was made for something else.
        """
        model = loaded.model
        calibration = None
        if cache.calibration is not None:
            calibration = PoolCalibration.read(cache.calibration)
            calibration.check_made_for(loaded.fingerprint.hex(), cache.kv_format)
        refuse_unsupported(model)
        attachment = Attachment(model)
        try:
            shape = observe(model)
            spec = KVCacheSpec(shape.layers, shape.dtype, cache.kv_format, cache.block_size)
            if calibration is not None:
                spec = calibration.applied(spec, biased=shape.softcap or shape.sinks)
            num_blocks = plan_num_blocks(spec, cache.memory, loaded.device)
            storage = _allocate(spec, num_blocks, loaded.device, calibration)
            with storage.committing_ahead():  # and the weights' pages still
                prepare_backends(loaded.device.type)
                if pages is not None:
                    pages.settle()
            choice = select_backend(shape.attention_spec(spec, loaded.device.type))
            storage.choose_writer()
            runner = cls(model, attachment, shape, storage, choice, calibration)
            runner._prove(loaded, pages)
        except BaseException:
            attachment.detach()
            raise
        return runner

    @property
    def decoder(self) -> str:
        """``"compiled"``, ``"fused"`` or ``"stock"``: what runs the layers of a decode step."""
        fused = self._current_fused()
        if fused is None:
            return "stock"
        return "compiled" if fused.uses_kernels else "fused"

    @property
    def format(self) -> str:
        """The pool's format, and what the calibration adds to it, in words."""
        if self.calibration is None:
            return self.spec.kv_format
        return f"{self.spec.kv_format}, calibrated, {len(self.spec.raised)} heads raised"

    @property
    def pool_key(self) -> bytes:
        """What decides the stored rows besides the model, as bytes."""
        text = f"{self.spec.kv_format}|{self.spec.block_size}".encode()
        return text if self.calibration is None else text + b"|" + self.calibration.digest

    def execute(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute one step; writes the rows of every chunk's tokens.

        Args:
            chunks: At least one; no row of the pool may be written twice, and rows behind a chunk's end must be finite
                (a freed block is zeroed): attention masks them, but a masked NaN is still NaN.

        Returns:
            [R, V] float32 on the model's device: logits of the last token of each chunk that needs them, in order.

        Raises:
            IntegrityError: If a block table does not fit its chunk or the model skipped a layer.
            UnsupportedModel: If the model was changed and its own layers, which now run, fail the self-test.
        """
        if self._awaits_backend and not readiness.is_waiting():
            self._change_backend()
        fused = self._current_fused()
        if fused is None and not self._stock_is_proved:  # the model was changed since
            self._prove_stock()
        batch = ForwardBatch.build(
            chunks, block_size=self.spec.block_size, num_blocks=self.num_blocks, device=self.storage.device
        )
        return self._forward(batch, self.storage, fused)

    def close(self) -> None:
        """Give the model back to its owner; the pool's memory goes with this object."""
        self._attachment.detach()

    def _current_fused(self) -> FusedDecoder | None:
        """Return the fused decoder if it may run: to look takes as long as a small layer, so a step looks once."""
        return self._fused if self._fused is not None and self._fused.is_current() else None

    def _forward(self, batch: ForwardBatch, storage: KVStorage, fused: FusedDecoder | None) -> torch.Tensor:
        if fused is not None:
            with torch.inference_mode():
                return fused.forward(batch, storage, self._backend).float()
        step = PoolStep(storage, self._backend, batch.attention, self._shape.windows)
        options: dict[str, Any] = {"use_cache": False, "return_dict": True}
        if self._shape.keeps_logits:
            options["logits_to_keep"] = batch.logits_rows
        with torch.inference_mode():
            with active_step(step):
                output = self._model(input_ids=batch.input_ids, position_ids=batch.position_ids, **options)
            step.finish(len(self.spec.layers))
            logits: torch.Tensor = output.logits[0]
            if not self._shape.keeps_logits:
                logits = logits.index_select(0, batch.logits_rows)
            return logits.float()

    def _prove(self, loaded: LoadedModel, pages: Arena | None) -> None:
        """Compare the stock model with the pool, and take the fused decoder if it passes the same test.

        Args:
            loaded: The model.
            pages: For its weights.

        Raises:
            UnsupportedModel: If the logits differ more than rounding explains.
        """
        longest = min(_SELF_TEST_TOKENS, loaded.max_context or _SELF_TEST_TOKENS)
        generator = torch.Generator().manual_seed(0)
        lengths = (longest, max(1, longest * 2 // 3))
        self._prompts = [torch.randint(0, loaded.vocab_size, (n,), generator=generator).tolist() for n in lengths]
        proof = self._prompts, self._stock_logits(self._prompts)
        if self._awaits_backend:
            self._proof = proof
        try:
            self._fused = FusedDecoder(self._model, self._shape, pages)
            self.self_test_error = self._self_test(*proof)
        except (NotFusable, UnsupportedModel) as error:
            self._fused = None
            self.decoder_refusal = str(error)
            self._prove_stock(proof)
        self._use_kernels(proof)

    def _prove_stock(self, proof: _Proof | None = None) -> None:
        """Compare the stock layers over the pool with the stock model: at load, or once they take over.

        Raises:
            UnsupportedModel: If the logits differ more than rounding explains.
        """
        self.self_test_error = self._self_test(*(proof or (self._prompts, self._stock_logits(self._prompts))))
        self._stock_is_proved = True

    def _use_kernels(self, proof: _Proof) -> None:
        """Let compiled kernels run the fused decoder's small steps, if they attend and pass the self-test."""
        if self._fused is None:
            return
        if self.backend != NumbaBackend.name:  # what refuses attention by kernels refuses steps by kernels
            self.step_refusal = self.refusals.get(NumbaBackend.name, "attention does not run by kernels")
            return
        try:
            self.step_refusal = self._fused.use_kernels()
            if self.step_refusal is None:
                self._self_test(*proof)
        except Exception as error:  # whatever it is, torch runs the steps as well
            self._fused.use_torch()
            self.step_refusal = _what(error)

    def _change_backend(self) -> None:
        """Take the backend that has become ready, if it passes the self-test; whatever happens, one serves on."""
        self._awaits_backend = False
        proof, self._proof = self._proof, None
        choice, former = select_backend(self._shape.attention_spec(self.spec, self.storage.device.type)), self._backend
        self.refusals = choice.refusals
        if proof is None or choice.backend.name == self.backend:
            return
        self._backend, self.backend = choice.backend, choice.backend.name
        try:
            self.self_test_error = self._self_test(*proof)
            self.storage.choose_writer()
        except Exception as error:
            self._backend, self.backend = former, former.name
            self.refusals = {choice.backend.name: _what(error)}
            self.storage.keep_torch_writer()
            logger.warning("attention stays with %s: %s", former.name, _what(error))
            return
        self._use_kernels(proof)
        logger.info("attention from now on: %s", self.backend)

    def _self_test(self, prompts: list[list[int]], want: torch.Tensor) -> float:
        """Compute the prompts in a small pool of their own and compare logits with ``want``.

        Returns:
            The difference as a share of the spread of the logits.

        Raises:
            UnsupportedModel: If they differ more than rounding explains.
        """
        got = torch.cat(self._pooled_logits(prompts))
        error = (got - want).abs().mean(-1) / want.std(-1).clamp_min(1e-6)
        # One expert chosen otherwise by rounding may move a token far: in 16 bits the middle one counts. A wrong mask,
        # position or option moves most of them.
        dtype = str(self._model.dtype).removeprefix("torch.")  # not the pool's: the model may have been cast since
        measured = float(error.max() if dtype == "float32" else error.median())
        allowed = _TOLERANCE[dtype] * math.sqrt(len(self.spec.layers))
        if not measured <= allowed:
            raise UnsupportedModel(
                f"self-test failed: logits through the pool differ from stock logits by {measured:.3g} of their spread "
                f"({dtype}, allowed {allowed:.3g})"
            )
        return measured

    def _stock_logits(self, prompts: list[list[int]]) -> torch.Tensor:
        """Return [T, V], all prompts side by side. The shorter ones are filled up behind, where nothing looks."""
        longest = max(map(len, prompts))
        ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=self.storage.device)
        with torch.inference_mode():
            output = self._model(input_ids=ids, use_cache=False, return_dict=True)
        rows = [logits[: len(prompt)] for logits, prompt in zip(output.logits, prompts, strict=True)]
        return torch.cat(rows).float().cpu()

    def _pooled_logits(self, prompts: list[list[int]]) -> list[torch.Tensor]:
        """Return [T, V] logits of each prompt, packed and in two chunks, over blocks that lie in no order."""
        block_size = self.spec.block_size
        needed = [-(-len(prompt) // block_size) for prompt in prompts]
        ids = list(range(sum(needed)))[::-1]
        tables = [ids[: needed[0]], ids[needed[0] :]]
        # What is proved here is the plumbing; what a format costs is measured by calibration, not by a tight bound.
        storage = KVStorage(replace(self.spec, kv_format="model", raised=()), len(ids), self.storage.device)
        rows: list[list[torch.Tensor]] = [[] for _ in prompts]
        cuts = [len(prompt) // 2 for prompt in prompts]
        for starts, ends in (([0, 0], cuts), (cuts, [len(prompt) for prompt in prompts])):
            spans = [(i, s, e) for i, (s, e) in enumerate(zip(starts, ends, strict=True)) if e > s]
            if not spans:
                continue
            chunks = [Chunk(prompts[i][s:e], s, tables[i], True) for i, s, e in spans]
            batch = ForwardBatch.build(
                chunks, block_size=block_size, num_blocks=len(ids), device=storage.device, all_logits=True
            )
            logits = self._forward(batch, storage, self._current_fused()).cpu()
            row = 0
            for i, s, e in spans:
                rows[i].append(logits[row : row + e - s])
                row += e - s
        return [torch.cat(parts) for parts in rows]


def _what(error: Exception) -> str:
    """Return why something is refused, from what it raised."""
    return str(error) if isinstance(error, UnsupportedModel) else f"self-test failed: {type(error).__name__}: {error}"


def _allocate(
    spec: KVCacheSpec, num_blocks: int, device: torch.device, calibration: PoolCalibration | None
) -> KVStorage:
    try:
        return KVStorage(spec, num_blocks, device, None if calibration is None else calibration.offset_tensors())
    except (OSError, MemoryError, OverflowError, torch.OutOfMemoryError) as error:
        size = num_blocks * spec.bytes_per_block / 2**30
        raise ConfigError(f"CacheConfig.memory: {device} does not give {size:.1f} GiB; ask for less") from error
