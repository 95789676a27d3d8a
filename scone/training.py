"""Joint training of main and f-gram model, or of the plain baseline: one process, or many under torch.distributed.

Position in the data is the number of completed steps alone: each step's sequences are a function of (seed, step), and
each worker takes its share of them. So a training that was interrupted, resumed or continued on another number of
workers sees the same data, and with the same number of workers and threads on CPU it ends with the same bits.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from scone.checkpoints import TrainingState, load_checkpoint, save_checkpoint
from scone.errors import TrainingError
from scone.models import SconeForCausalLM
from scone.models.fgram_model import measure_trie_error
from scone.models.next_token_loss import SUMS, NextTokenLoss
from scone.sequences import SequenceOrder, SequenceReader
from scone.training_settings import TrainingSettings

logger = logging.getLogger(__name__)

# float32 rounding stays below 1e-5; a decoder that looks beyond its f-gram is off by its own size.
_MAX_TRIE_ERROR = 1e-3


@dataclass(frozen=True, slots=True)
class World:
    """The workers of a training, and which of them this process is."""

    rank: int
    size: int

    @classmethod
    def current(cls) -> World:
        """From the initialised process group; alone without one."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls(0, 1)

    def share_of(self, indices: np.ndarray) -> np.ndarray:
        """This worker's part of the sequences; the parts differ by one at most."""
        return np.array_split(indices, self.size)[self.rank]

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the workers, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """What is known after a logged step. `metrics` is reproducible, `measured` depends on the machine."""

    step: int
    metrics: dict[str, float]
    measured: dict[str, float]


class Trainer:
    """Trains one model. Every worker has one, with the same settings and data."""

    def __init__(
        self,
        settings: TrainingSettings,
        model: SconeForCausalLM,
        train_data: SequenceReader,
        heldout_data: SequenceReader | None = None,
        *,
        fingerprint: str = "",
        device: str = "cpu",
    ) -> None:
        """Ready at step 0.

        Args:
            fingerprint: Of everything that decides the result; a checkpoint of another one is refused.

        Raises:
            TrainingError: More workers than sequences in a step, no held-out data although it is to be measured,
                or an f-gram model that is not exact on a trie.
        """
        self.settings, self.model, self.device = settings, model.to(device), torch.device(device)
        self.train_data, self.heldout_data = train_data, heldout_data
        self.world = World.current()
        if self.world.size > settings.global_batch_size:
            raise TrainingError(
                f"{self.world.size} workers share a global batch of {settings.global_batch_size} sequences; raise "
                "global_batch_size or use fewer workers"
            )
        if settings.heldout_sequences and heldout_data is None:
            raise TrainingError("there is no held-out data to measure; set heldout_sequences to 0")
        _check_exactness(model)
        self.order = SequenceOrder(train_data.num_sequences, settings.seed, settings.global_batch_size)
        self.optimizer = _build_optimizer(model, settings)
        self.objective = NextTokenLoss(model)
        self.parallel: nn.Module = self.objective
        if self.world.size > 1:
            # The only buffers, rotary frequencies, never change: nothing to send in each forward.
            self.parallel = nn.parallel.DistributedDataParallel(
                self.objective,
                device_ids=[self.device] if self.device.type == "cuda" else None,
                forward_sync_buffers=False,
                gradient_as_bucket_view=True,
            )
        self.state = TrainingState(fingerprint, pending=_no_sums())
        self._training_seconds = 0.0
        self._timed_steps = 0

    @property
    def is_finished(self) -> bool:
        return self.state.step >= self.settings.steps

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint. Raises ArtifactError as `load_checkpoint` does."""
        self.state = load_checkpoint(folder, self.model, self.optimizer, self.state.fingerprint)

    def save(self, folder: Path) -> None:
        """Write a checkpoint of the completed steps; one worker is enough, all are equal."""
        save_checkpoint(folder, self.model, self.optimizer, self.state)

    def run(
        self,
        on_log: Callable[[LoggedStep], None] = lambda _: None,
        on_checkpoint: Callable[[], None] = lambda: None,
        checkpoint_interval: int = 0,
    ) -> None:
        """Train to the last step.

        Args:
            on_log: Called on every worker after each logged step.
            on_checkpoint: Called on every worker, every `checkpoint_interval` steps and after the last one.

        Raises:
            TrainingError: Loss or gradient is not finite.
        """
        self.model.train()
        with deterministic_algorithms(self.device):
            while not self.is_finished:
                started = time.monotonic()
                sums, gradient_norm = self._step()
                self._training_seconds += time.monotonic() - started
                self._timed_steps += 1
                self.state.pending = [old + new for old, new in zip(self.state.pending, [*sums, 1.0], strict=True)]
                if self.settings.is_logged(self.state.step):
                    on_log(self._log(gradient_norm))
                is_due = checkpoint_interval > 0 and self.state.step % checkpoint_interval == 0
                if is_due or self.is_finished:
                    on_checkpoint()

    def heldout_loss(self) -> float:
        """Mean next-token loss over the first `heldout_sequences` held-out sequences, on all workers."""
        assert self.heldout_data is not None
        number = min(self.settings.heldout_sequences, self.heldout_data.num_sequences)
        total = torch.zeros((), dtype=torch.float64)
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad():
            share_of_batch = -(-self.settings.global_batch_size // self.world.size)
            for part in self._micro_batches(np.arange(number), self.settings.micro_batch_size or share_of_batch):
                total += self._losses(self.objective, self.heldout_data, part)[0].double().cpu()
        self.model.train(was_training)
        return float(self.world.sum(total)) / (number * self.heldout_data.sequence_length)

    def _step(self) -> tuple[list[float], float]:
        """One optimiser step; returns the sums over its global batch, and the gradient norm."""
        step, settings = self.state.step, self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(step) * group["multiplier"]
        # Dropout, where a config has some, is a function of (seed, step, worker) too.
        torch.manual_seed((settings.seed * 1_000_003 + step) * 4_099 + self.world.rank)
        num_targets = settings.global_batch_size * self.train_data.sequence_length
        totals = torch.zeros(1 + len(SUMS), dtype=torch.float64)
        parts = self._micro_batches(self.order.indices(step), settings.micro_batch_size)
        for number, part in enumerate(parts, start=1):
            with self._without_synchronisation(unless=number == len(parts)):
                loss, sums = self._losses(self.parallel, self.train_data, part)
                # Data parallelism averages over the workers; together they hold the mean over the global batch.
                torch.autograd.backward(loss * (self.world.size / num_targets))
            totals += torch.cat((loss.detach()[None], sums)).double().cpu()
        gradient_norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), settings.gradient_clip))
        values = self.world.sum(totals).tolist()
        if not math.isfinite(values[0]) or not math.isfinite(gradient_norm):
            raise TrainingError(
                f"step {step + 1}: loss {values[0] / num_targets} and gradient norm {gradient_norm}; lower "
                "learning_rate or gradient_clip, or lengthen warmup_steps, and train anew"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state.step += 1
        return values, gradient_norm

    def _micro_batches(self, indices: np.ndarray, size: int) -> list[np.ndarray]:
        share = self.world.share_of(indices)
        size = size or max(1, len(share))
        return [share[start : start + size] for start in range(0, len(share), size)]

    def _losses(self, module: nn.Module, data: SequenceReader, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        batch = data.read(indices)
        token_ids = torch.from_numpy(batch.token_ids).to(self.device)
        match_length = torch.from_numpy(batch.match_length).to(self.device)
        is_bf16 = self.settings.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=is_bf16):
            losses: tuple[Tensor, Tensor] = module(token_ids, match_length)
        return losses

    def _without_synchronisation(self, unless: bool) -> contextlib.AbstractContextManager[None]:
        if unless or not isinstance(self.parallel, nn.parallel.DistributedDataParallel):
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[None] = self.parallel.no_sync()
        return context

    def _log(self, gradient_norm: float) -> LoggedStep:
        """Metrics of the steps since the last logged one; becomes part of the history."""
        settings, step = self.settings, self.state.step
        tokens_per_step = settings.global_batch_size * self.train_data.sequence_length
        loss, matches, nodes, fgram_norms, token_norms, num_steps = self.state.pending
        positions = num_steps * tokens_per_step
        metrics = {
            "step": step,
            "tokens": step * tokens_per_step,
            "loss": loss / positions,
            "learning_rate": settings.learning_rate_at(step - 1),
            "gradient_norm": gradient_norm,
        }
        if self.model.config.has_fgrams:
            metrics["match_rate"] = matches / positions
            metrics["nodes_per_position"] = nodes / positions
            metrics["fgram_norm_ratio"] = fgram_norms / token_norms if token_norms else 0.0
            if self.model.fusion is not None and self.model.fusion.kind != "replace":
                metrics["fusion_scale"] = float(self.model.fusion.scale.detach())
        if settings.is_heldout_measured(step):
            metrics["heldout_loss"] = self.heldout_loss()
        self.state.pending = _no_sums()
        self.state.history.append(metrics)
        seconds = self._training_seconds / self._timed_steps
        measured = {"seconds_per_step": seconds, "tokens_per_second": tokens_per_step / seconds}
        self._training_seconds, self._timed_steps = 0.0, 0
        return LoggedStep(step, metrics, measured)


def _no_sums() -> list[float]:
    """Loss, then SUMS, then the number of steps."""
    return [0.0] * (1 + len(SUMS) + 1)


def _check_exactness(model: SconeForCausalLM) -> None:
    if model.fgram_model is None:
        return
    try:
        error = measure_trie_error(model.fgram_model, model.config.max_fgram_length)
        reason = f"it differs by {error:.2g}" if not error < _MAX_TRIE_ERROR else ""
    except ValueError as cause:
        reason = str(cause)
    if reason:
        kind = model.config.fgram_config.model_type
        raise TrainingError(
            f"fgram_model: {kind} does not give the same on a trie as on single f-grams: {reason}; "
            "choose another decoder"
        )


def _build_optimizer(model: SconeForCausalLM, settings: TrainingSettings) -> torch.optim.AdamW:
    """AdamW that decays matrices only; f-gram model and fusion may have a learning rate of their own."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        key = (not name.startswith("main_model."), parameter.ndim >= 2)
        groups.setdefault(key, []).append(parameter)
    return torch.optim.AdamW(
        [
            {
                "params": parameters,
                "weight_decay": settings.weight_decay if is_matrix else 0.0,
                "multiplier": settings.fgram_learning_rate_multiplier if is_fgram else 1.0,
            }
            for (is_fgram, is_matrix), parameters in groups.items()
        ],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        fused=True,
    )


@contextlib.contextmanager
def deterministic_algorithms(device: torch.device) -> Iterator[None]:
    """Bit-exact repetition on CPU for the block; left as it is on accelerators, where it costs speed."""
    if device.type != "cpu":
        yield
        return
    was_enabled = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # nothing reads it, and filling costs time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled)
        settings.fill_uninitialized_memory = fills
