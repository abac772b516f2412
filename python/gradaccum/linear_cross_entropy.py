# SPDX-License-Identifier: Apache-2.0
"""The mean loss of a language model's head by parts of the tokens, so that not all logits exist at a time."""

import torch

MEMORY_BUDGET = 128 * 2**20  # bytes of logits at a time, as in ga::linear_cross_entropy
IGNORED = -100


class _OfTokens(torch.autograd.Function):
    """The sum over all tokens. The forward pass computes the gradients, each part's with its logits, and sums them in
    float32 or wider."""

    @staticmethod
    def forward(context, hidden, weight, bias, labels, parts):
        wide, kind = torch.promote_types(hidden.dtype, torch.float32), hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        has_gradient, loss = any(context.needs_input_grad), torch.zeros((), dtype=wide, device=hidden.device)
        of_hidden, of_weight, of_bias = [], None, None
        with torch.autocast(kind, enabled=False):  # which would narrow the sums, too
            matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
            for x, targets in zip(hidden.to(dtype).chunk(parts, 1), labels.chunk(parts, 1)):
                logits = torch.nn.functional.linear(x, matrix, offset).to(wide)
                counts, classes = targets != IGNORED, targets.clamp(min=0).unsqueeze(-1)
                log_sum = logits.logsumexp(-1, keepdim=True)
                loss = loss + ((log_sum - logits.gather(-1, classes)).squeeze(-1) * counts).sum()
                if not has_gradient:
                    continue
                is_target = torch.arange(len(matrix), device=matrix.device) == classes
                of_logits = (((logits - log_sum).exp() - is_target.to(wide)) * counts.unsqueeze(-1)).to(dtype)
                of_hidden.append(torch.matmul(of_logits, matrix).to(hidden.dtype))
                of_weight = sum_with_product(of_weight, of_logits.flatten(0, 1).t(), x.flatten(0, 1), wide)
                if bias is not None:
                    part = of_logits.to(wide).sum((0, 1))
                    of_bias = part if of_bias is None else of_bias + part
        if has_gradient:
            context.save_for_backward(torch.cat(of_hidden, 1), of_weight, of_bias)
            context.dtypes = weight.dtype, bias.dtype if bias is not None else None
        return loss

    @staticmethod
    def backward(context, seed):
        of_hidden, of_weight, of_bias = context.saved_tensors
        needs, (dtype, dtype_of_bias) = context.needs_input_grad, context.dtypes
        return (of_hidden * seed.to(of_hidden.dtype) if needs[0] else None,
                (of_weight * seed).to(dtype) if needs[1] else None,
                (of_bias * seed).to(dtype_of_bias) if needs[2] else None, None, None)


def sum_with_product(total, left, right, dtype):
    """Returns the product added to a sum in `dtype`, if there is one."""
    if total is None:
        return torch.mm(left, right).to(dtype)
    return torch.addmm(total, left, right) if left.dtype == dtype else total + torch.mm(left, right)


def linear_cross_entropy(hidden, weight, labels, bias=None):
    """Returns cross_entropy(linear(hidden, weight, bias), labels), a mean over the labels that are not -100.

    hidden: [rows, tokens, width]; labels: [rows, tokens]. A part has some tokens of all rows: as many as have logits of
    MEMORY_BUDGET bytes in float32, and at least one.
    """
    rows, tokens = labels.shape
    if isinstance(rows, torch.SymInt):  # in a graph for any number of rows: as for those of the sample
        rows = rows.node.hint
    parts = -(-tokens // max(MEMORY_BUDGET // (rows * weight.shape[0] * 4), 1))
    total = _OfTokens.apply(hidden, weight, bias, labels, parts)
    return total / (labels != IGNORED).sum()
