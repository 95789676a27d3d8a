"""Next-token loss of a SCONE model, without ever holding the logits of a whole batch."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from scone.models.scone_model import SconeForCausalLM

_CHUNK_LOGITS = 4 << 20  # 16 MiB of float32 at a time
SUMS = ("matches", "nodes", "fgram_norms", "token_norms")
# Settings with which a main model changes its logits after the head; it then computes them itself.
_LOGIT_SETTINGS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier", "logits_scale")


class NextTokenLoss(nn.Module):
    """Sums of the next-token losses and of what is measured on a batch; the module that data parallelism wraps."""

    def __init__(self, model: SconeForCausalLM) -> None:
        super().__init__()
        self.model = model
        settings = model.config.get_text_config()
        head = model.get_output_embeddings()
        self._has_plain_head = isinstance(head, nn.Linear) and not any(
            getattr(settings, name, None) not in (None, 1.0) for name in _LOGIT_SETTINGS
        )

    def forward(self, token_ids: Tensor, match_length: Tensor | None) -> tuple[Tensor, Tensor]:
        """Loss summed over the L targets of each sequence (float32 scalar), and sums by SUMS [4] without gradient.

        Args:
            token_ids: [B, L + 1] int64; inputs are all but the last, targets all but the first.
            match_length: [B, L + 1]; None matches with the attached index, from the table if there is one.
        """
        inputs, targets = token_ids[:, :-1], token_ids[:, 1:]
        if match_length is not None:
            match_length = match_length[:, :-1]
        fused = self.model.fused_embeddings(inputs, match_length)
        loss = self._loss(fused.embeddings, targets.flatten())
        with torch.no_grad():
            norms = [states.float().norm(dim=1).sum() for states in (fused.matched_fgrams, fused.matched_tokens)]
            counts = loss.new_tensor([fused.matched_fgrams.shape[0], fused.num_nodes])
            sums = torch.cat((counts, torch.stack(norms)))
        return loss, sums

    def _loss(self, embeddings: Tensor, targets: Tensor) -> Tensor:
        main_model, head = self.model.main_model, self.model.get_output_embeddings()
        if not self._has_plain_head:
            logits = main_model(inputs_embeds=embeddings, use_cache=False).logits
            return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum")
        hidden = main_model.base_model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
        return linear_cross_entropy(hidden.flatten(0, 1), cast(Tensor, head.weight), cast(Tensor, head.bias), targets)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """Cross-entropy of `hidden @ weight.T + bias` with `targets`, summed, float32.

    Forward and backward go together over chunks of rows, so memory holds the logits of one chunk, never of all rows.

    Args:
        hidden: [N, D].
        weight: [V, D].
        targets: [N] int64.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, targets)  # type: ignore[no-untyped-call]  # torch's
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        needs_grad = torch.is_grad_enabled() or any(ctx.needs_input_grad)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_grad and bias is not None else None
        rows = max(1, _CHUNK_LOGITS // weight.shape[0])
        for start in range(0, hidden.shape[0], rows):
            states, wanted = hidden[start : start + rows], targets[start : start + rows, None]
            logits = nn.functional.linear(states, weight, bias).float()
            largest = logits.amax(1, keepdim=True)
            probabilities = logits.sub_(largest)
            of_target = probabilities.gather(1, wanted)
            norm = probabilities.exp_().sum(1, keepdim=True)
            total += (norm.log() - of_target).sum()
            if grad_hidden is None or grad_weight is None:
                continue
            probabilities.div_(norm).scatter_add_(1, wanted, torch.full_like(of_target, -1.0))
            grad_logits = probabilities.to(weight.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[start : start + rows])
            if weight.dtype == torch.float32:
                grad_weight.addmm_(grad_logits.T, states)
            else:
                grad_weight += torch.mm(grad_logits.T, states)
            if grad_bias is not None:
                grad_bias += probabilities.sum(0)
        if grad_hidden is not None and grad_weight is not None:
            ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
            ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        (scale,) = grads
        bias = None if grad_bias is None else (grad_bias * scale).to(ctx.dtype)
        return grad_hidden * scale.to(grad_hidden.dtype), (grad_weight * scale).to(ctx.dtype), bias, None
