# SPDX-License-Identifier: Apache-2.0
"""The mean cross entropy of a linear layer by parts of the tokens, so that not all logits exist at a time: of an exported
language model's head, and of ga::linear_cross_entropy in a step that ga::save_step recorded."""

import contextlib
import functools
import math

import torch

MEMORY_BUDGET = 128 * 2**20  # bytes of logits at a time, as in ga::linear_cross_entropy
MOST_PARTS = 64  # a compilation takes half a second for each, and more than that from about 100
IGNORED = -100


def losses_of(logits, classes, label_smoothing, z_loss):
    """Returns the loss of each token, and the logsumexp of its logits."""
    log_sum = logits.logsumexp(-1, keepdim=True)
    losses = log_sum - (1 - label_smoothing) * logits.gather(-1, classes.unsqueeze(-1))
    if label_smoothing:
        losses = losses - label_smoothing * logits.mean(-1, keepdim=True)
    if z_loss:
        losses = losses + z_loss * log_sum.square()
    return losses.squeeze(-1), log_sum


class _OfTokens(torch.autograd.Function):
    """The weighted sum of all tokens' losses, and these losses. The forward pass computes the gradients, each part's with
    its logits, and sums them in float32 or wider."""

    @staticmethod
    def forward(context, hidden, weight, bias, classes, counted, factors, dtype, parts, label_smoothing, z_loss):
        wide, of_losses = factors.dtype, (label_smoothing, z_loss)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        has_gradient, all_losses = any(context.needs_input_grad), []
        of_hidden, of_weight, of_bias = [], None, None
        with torch.autocast(hidden.device.type, enabled=False):  # which would narrow the sums, too
            matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
            of_tokens = (tensor.chunk(parts, classes.dim() - 1) if parts > 1 else [tensor]
                         for tensor in (hidden.to(dtype), classes, counted, factors))
            for x, targets, counts, factor in zip(*of_tokens):
                x = x.flatten(0, -2)
                # With the bias and its gradient outside of products, the compiler would fuse all parts, and keep them.
                product = torch.mm(x, matrix.t()) if bias is None else torch.addmm(offset, x, matrix.t())
                logits = product.view(*targets.shape, len(matrix)).to(wide)
                losses, log_sum = losses_of(logits, targets, *of_losses)
                all_losses.append(torch.where(counts, losses, 0))
                total = total + (all_losses[-1] * factor).sum()  # with one sum of all, all parts would be kept
                if not has_gradient:
                    continue
                of_logits = (logits - log_sum).exp()
                if z_loss:
                    of_logits = of_logits * (1 + 2 * z_loss * log_sum)
                is_target = torch.arange(len(matrix), device=matrix.device) == targets.unsqueeze(-1)
                of_logits = of_logits - (1 - label_smoothing) * is_target.to(wide) - label_smoothing / len(matrix)
                of_logits = (of_logits * factor.unsqueeze(-1)).to(dtype)
                of_hidden.append(torch.matmul(of_logits, matrix).to(hidden.dtype))
                of_logits = of_logits.flatten(0, -2).t()
                of_weight = sum_with_product(of_weight, of_logits, x, wide)
                if bias is not None:
                    of_bias = sum_with_product(of_bias, of_logits, torch.ones_like(x[:, :1]), wide)
        if has_gradient:
            context.save_for_backward(torch.cat(of_hidden, classes.dim() - 1), of_weight, of_bias)
            context.dtypes = weight.dtype, bias.dtype if bias is not None else None
        losses = torch.cat(all_losses, -1)
        context.mark_non_differentiable(losses)
        return total, losses

    @staticmethod
    def backward(context, seed, _):
        of_hidden, of_weight, of_bias = context.saved_tensors
        needs, (dtype, dtype_of_bias) = context.needs_input_grad, context.dtypes
        return (of_hidden * seed.to(of_hidden.dtype) if needs[0] else None,
                (of_weight * seed).to(dtype) if needs[1] else None,
                (of_bias.squeeze(1) * seed).to(dtype_of_bias) if needs[2] else None, *[None] * 7)


def sum_with_product(total, left, right, dtype):
    """Returns the product added to a sum in `dtype`, if there is one."""
    if total is None:
        return torch.mm(left, right).to(dtype)
    return torch.addmm(total, left, right) if left.dtype == dtype else total + torch.mm(left, right)


def parts_of(labels, classes, memory_budget, dtype, rows=None):
    """Returns the number of parts of the tokens, the labels' last dimension. A part has tokens of all rows: as many as have
    logits of `memory_budget` bytes in `dtype`, and more if there would be too many parts. `rows`: of a trace, and of the
    batch that it is for."""
    def size_of(size):
        size = size.node.hint if isinstance(size, torch.SymInt) else size
        of_rows = rows and (size == rows[0] or labels.dim() == 1 and size % rows[0] == 0)
        return size // rows[0] * rows[1] if of_rows else size

    *leading, tokens = map(size_of, labels.shape)
    at_once = memory_budget // max(math.prod(leading) * classes * dtype.itemsize, 1)
    return min(max(-(-tokens // max(at_once, 1)), 1), MOST_PARTS)


def linear_cross_entropy(hidden, weight, labels, bias=None, parts=1):
    """Returns cross_entropy(linear(hidden, weight, bias), labels), a mean over the labels that are not -100.

    hidden: [rows, tokens, width]; labels: [rows, tokens]; parts: of the tokens."""
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    counted = labels != IGNORED
    factors = counted.to(torch.promote_types(hidden.dtype, torch.float32))
    classes = torch.where(counted, labels, 0)
    total, _ = _OfTokens.apply(hidden, weight, bias, classes, counted, factors, dtype, parts, 0.0, 0.0)
    return total / factors.sum()


OPERATION = """linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? weights,
    int ignore_index, float label_smoothing, float z_loss, int memory_budget, ScalarType dtype) -> (Tensor, Tensor)"""


def of_operation(rows, hidden, weight, bias, target, weights, ignore_index, label_smoothing, z_loss, memory_budget, dtype):
    """Returns what `ga::linear_cross_entropy` does: the mean, 0 if no token counts, and each token's loss."""
    hidden, target, shape = torch.atleast_2d(hidden), torch.atleast_1d(target), target.shape
    counted = target != ignore_index
    factors = torch.where(counted, 1 if weights is None else weights.reshape(target.shape), 0).to(
        torch.promote_types(weight.dtype, torch.float32))
    of_losses, classes = (label_smoothing, z_loss), torch.where(counted, target, 0)
    if dtype == torch.float16:  # _OfTokens would lose the gradients of single classes, which are scaled later
        logits = torch.nn.functional.linear(*(None if x is None else x.to(dtype) for x in (hidden, weight, bias)))
        losses = torch.where(counted, losses_of(logits.to(factors.dtype), classes, *of_losses)[0], 0)
        total, losses = (losses * factors).sum(), losses.detach()
    else:
        parts = parts_of(target, len(weight), memory_budget, factors.dtype, rows)
        total, losses = _OfTokens.apply(hidden, weight, bias, classes, counted, factors, dtype, parts, *of_losses)
    items = factors.sum()
    return total / torch.where(items != 0, items, 1), losses.reshape(shape)


@contextlib.contextmanager
def as_operation(rows=None):
    """Defines the operation that ga::save_step records. `rows`: for `parts_of`."""
    with torch.library._scoped_library("gradaccum", "FRAGMENT") as library:
        library.define(OPERATION)
        library.impl("linear_cross_entropy", functools.partial(of_operation, rows), "CompositeImplicitAutograd")
        yield
