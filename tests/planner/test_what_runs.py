"""Which models a plan can run without values, what it counts in them, and what it says of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import lamina
from harness import run_ranks
from lamina.core.program import Op, Step
from lamina.errors import UsageError
from lamina.planner.machine import load_machine
from lamina.planner.measure import measure
from lamina.planner.rates import Reached
from lamina.planner.time import forecast_time
from lamina.planner.workload import Choice, MatrixProduct
from lamina.runtime.assemble import RUNTIMES
from lamina.train.planned import logits_are_the_heads

UNITS = [nn.Embedding, nn.Linear]
LONG = 70_000  # tokens of one sequence


class Calls(nn.Module):
    """A linear layer over what a function makes of tokens and their embedding."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding, self.head, self.function = nn.Embedding(16, 8), nn.Linear(8, 16), function

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.function(tokens, self.embedding(tokens)))


def products_of(function: Callable[[Tensor, Tensor], Tensor], seq: int = 4, **more: Any) -> list[MatrixProduct]:
    """All but the linear layer's."""
    measured = measure(Calls(function), 2, seq, **more)
    products = [product for unit in measured.workload.units for product in unit.forward_products]
    assert MatrixProduct(2 * seq, 16, 8, dtype_bytes=products[-1].dtype_bytes) in products
    return [product for product in products if (product.m, product.n) != (2 * seq, 16)]


def narrow_values(tokens: Tensor, x: Tensor) -> Tensor:
    """Latent attention: values are narrower than queries and keys."""
    wide = torch.cat((x, x), -1).unsqueeze(1)  # [batch, 1, seq, 16]
    mixed = scaled_dot_product_attention(wide, wide, x.unsqueeze(1), is_causal=True)
    assert mixed.shape == (*x.shape[:1], 1, *x.shape[1:])
    return mixed.squeeze(1)


def test_attention_whose_values_are_narrower() -> None:
    (product,) = products_of(narrow_values, precision="bf16")
    assert product.is_attention and (product.m, product.n, product.k, product.batch) == (4, 4, 12, 2)
    by_parts = products_of(narrow_values, kind="cpu")  # no kernel for it there: two products
    assert [(p.m, p.n, p.k) for p in by_parts] == [(4, 4, 16), (4, 8, 4)]


def experts(tokens: Tensor, x: Tensor) -> Tensor:
    rows, ends = x.flatten(0, 1), torch.empty(3, dtype=torch.int32)
    weights = torch.empty(3, 8, 8, dtype=rows.dtype)
    return torch._grouped_mm(rows, weights, offs=ends).view_as(x)


def counted_experts(tokens: Tensor, x: Tensor) -> Tensor:
    """The same by hand: rows are sorted by expert, and counted."""
    rows = x.flatten(0, -2)
    chosen = rows.argmax(-1)
    order = chosen.argsort()
    ends = torch.bincount(chosen, minlength=4).cumsum(0).to(torch.int32)
    weights = torch.empty(4, 8, 8, dtype=torch.bfloat16, device=x.device)
    mixed = torch._grouped_mm(rows[order].bfloat16(), weights, offs=ends)
    return torch.zeros_like(rows).index_copy(0, order, mixed.to(rows.dtype)).view_as(x)


def test_rows_of_experts_may_be_counted() -> None:
    (product,) = products_of(counted_experts, precision="bf16")
    assert (product.m, product.n, product.k, product.batch) == (2, 8, 8, 4)
    with pytest.raises(UsageError, match="cannot run without values"):
        products_of(lambda tokens, x: x * torch.bincount(tokens.flatten()).sum())


def test_products_of_experts_are_products() -> None:
    """24 rows over three experts, whoever takes which."""
    (product,) = products_of(experts, seq=12, precision="bf16")
    assert product == MatrixProduct(8, 8, 8, batch=3)


class Scales(nn.Module):
    """One number for all elements, and what a function makes of the product."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale, self.function = nn.Parameter(torch.ones(1)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale)


def added_by(function: Callable[[Tensor], Tensor], kind: str = "cuda") -> tuple[int, float, int, float]:
    """Kernels of forward and the passes over 8 x 16 x 32 elements that they make; the same of backward."""
    rows = torch.empty(8, 16, 32, device="meta")

    def plain(model: nn.Module, given: Any) -> Tensor:
        """Whose gradient is no number that was spread."""
        output = model(*given)
        return (output * torch.ones_like(output)).sum()

    works = [
        measure(Scales(f), 1, 1, inputs=[rows], loss=plain, kind=kind).workload.units[0]
        for f in (lambda x: x, function)
    ]
    bare, found = works
    assert found.backward_memory_bytes is not None and bare.backward_memory_bytes is not None
    assert found.backward_kernel_count is not None and bare.backward_kernel_count is not None
    return (
        found.kernel_count - bare.kernel_count,
        (found.forward_memory_bytes - bare.forward_memory_bytes) / rows.nbytes,
        found.backward_kernel_count - bare.backward_kernel_count,
        (found.backward_memory_bytes - bare.backward_memory_bytes) / rows.nbytes,
    )


def test_rows_are_normalised_by_one_kernel_with_and_without_weights() -> None:
    """On a GPU: read and written once; back, two are read and one is written. What torch takes apart there, it takes
    apart here: weights of another dtype, complex numbers; and everything on a CPU."""
    rms_norm = nn.functional.rms_norm
    weight = torch.ones(32, device="meta")
    once = (1, 2.0, 1, 3.0)
    assert added_by(lambda x: rms_norm(x, (32,))) == once
    assert added_by(lambda x: rms_norm(x, (32,), weight)) == once
    assert added_by(lambda x: rms_norm(x, (16, 32))) == once and added_by(lambda x: torch.rms_norm(x, [32])) == once
    turned = added_by(lambda x: rms_norm(x.transpose(0, 1), (32,)))
    assert turned[:2] == (2, 2 + 2 * 1.75), "the kernel wants plain rows: a copy before it"
    assert added_by(lambda x: rms_norm(x, (32,), weight.double()))[0] > 4
    assert added_by(lambda x: rms_norm(x, (32,)), "cpu")[0] > 4
    with pytest.raises(UsageError, match="normalized_shape"):
        added_by(lambda x: rms_norm(x, (31,)))


class Gated(nn.Module):
    """Two products, a gate between them that a compiler fuses, a product behind it, a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def test_what_a_compiler_fuses_moves_less() -> None:
    """silu, product and sum are 2, 3 and 3 passes in three kernels; fused, the first two are 3 passes in one."""
    blocks = nn.Sequential(*(Gated() for _ in range(2)))
    measured = measure(blocks, 1, 1, inputs=[torch.zeros(4, 8)], units=[Gated])
    unit = measured.workload.units[-1]
    pass_bytes = 4 * 8 * 4
    assert (unit.forward_memory_bytes, unit.kernel_count) == (8 * pass_bytes, 6)
    assert (unit.fused_memory_bytes, unit.fused_kernel_count) == (6 * pass_bytes, 5)
    # backward: silu and the two factors 3 passes each, two sums of three gradients of x 3 each; six products
    assert (unit.backward_memory_bytes, unit.backward_kernel_count) == (15 * pass_bytes, 11)
    again = measure(blocks, 1, 1, inputs=[torch.zeros(4, 8)], units=[Gated], recompute="full").workload.units[-1]
    assert (again.backward_memory_bytes, again.backward_kernel_count) == (15 * pass_bytes, 11)
    machine = load_machine("h100")
    plain, fused = (
        forecast_time(measured.workload, Choice(world=1, compiled=compiled), machine, Reached(unit_host_ms=0.0))
        for compiled in (False, True)
    )
    units = measured.workload.units
    launches = [sum(unit.kernel_count for unit in units), sum(unit.fused_kernel_count or 0 for unit in units)]
    assert fused.compute_ms / plain.compute_ms == pytest.approx(
        launches[1] / launches[0]
    )  # the host is what takes long
    assert launches[1] <= launches[0] - 2


class Wasteful(nn.Module):
    """Results that nobody reads; what a product makes comes to lie where one has been."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for _ in range(20):
            unread = torch.tanh(x) * 2
            unread = unread + 1
            del unread
            total = total + x @ self.weight
        return total


def test_what_is_fused_is_told_by_more_than_its_address() -> None:
    """Read are x by each tanh and by the first sum, and each product's result; written is the last sum."""
    model = nn.Sequential(Wasteful(), Wasteful())
    measured = measure(model, 1, 1, inputs=[torch.zeros(4, 8)], units=[Wasteful])
    assert measured.workload.units[-1].fused_memory_bytes == (20 + 1 + 20 + 1) * 4 * 8 * 4


def no_padding(tokens: Tensor, x: Tensor) -> Tensor:
    return x * float("nan") if 0 in tokens[:, [-1, 0]] else x


def all_ones(tokens: Tensor, x: Tensor) -> Tensor:
    return x if bool(torch.ones(tokens.shape).all()) else x[:, :0]


def in_a_row(tokens: Tensor, x: Tensor) -> Tensor:
    return x if bool((torch.arange(tokens.shape[1]).diff() == 1).all()) else x[:, :0]


@pytest.mark.parametrize("function, seq", [(no_padding, 4), (all_ones, 4), (in_a_row, LONG)])
def test_what_is_known_of_inputs(function: Callable[[Tensor, Tensor], Tensor], seq: int) -> None:
    """Models that warn of padding, make their own mask, and look at positions of long sequences."""
    assert products_of(function, seq) == []


def test_random_numbers_are_not_known() -> None:
    with pytest.raises(UsageError, match="cannot run without values: in `embedding` or just behind it"):
        products_of(lambda tokens, x: x * float(torch.zeros(1).normal_().item()))


def test_inputs_of_another_kind_are_asked_for() -> None:
    with pytest.raises(UsageError, match=r"does not run on the inputs of this plan \(input int64 \[1, 8\]\).*inputs="):
        measure(nn.Conv2d(3, 4, 3), 1, 8)
    assert measure(nn.Conv2d(3, 4, 3), 2, 1, inputs=[torch.zeros(2, 3, 8, 8)]).numel == 3 * 4 * 9 + 4
    narrow = measure(nn.Conv2d(3, 4, 3), 2, 1, inputs=[torch.zeros(2, 3, 8, 8)], precision="bf16")
    (product,) = narrow.workload.units[0].forward_products  # pixels are cast where they go in, as in a run
    assert product.dtype_bytes == 2
    with pytest.raises(UsageError, match="weight of this Sequential is lazy .* run the model once"):
        measure(nn.Sequential(nn.LazyLinear(4)), 1, 8)


def test_logits_that_are_capped_or_scaled_are_not_the_heads() -> None:
    """`lamina train` computes all of them at once then, so a plan must count them."""
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    sizes |= {"hidden_size": 16, "vocab_size": 32, "head_dim": 8}
    with torch.device("meta"):
        plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        capped = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes))
    assert logits_are_the_heads(plain) and not logits_are_the_heads(capped)


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2.0


def language_model(embedding: type[nn.Embedding]) -> nn.Module:
    return nn.Sequential(embedding(16, 8), *(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 16))


def gathers_of_a_step() -> list[list[int]]:
    """By model and unit, in the third step of this rank."""
    found = []
    for embedding in (nn.Embedding, Scaled):
        model = lamina.shard(language_model(embedding), "zero3", units=UNITS, slots=2, transport="c10d")
        units = RUNTIMES[model].units
        for _ in range(3):
            before = [unit.gathers for unit in units]
            model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
        found.append([unit.gathers - number for unit, number in zip(units, before, strict=True)])
    return found


def test_a_plan_gathers_what_ranks_gather() -> None:
    """An embedding once, for its backward reads no weights; one that scales, and a compiled one, twice."""
    expected, first = [], []
    for embedding in (nn.Embedding, Scaled):
        workload = measure(language_model(embedding), 2, 4, units=UNITS).workload
        for compiled in (False, True):
            choice = Choice("zero3", 2, slots=2, compute_bytes=4, compiled=compiled)
            steps = forecast_time(workload, choice, load_machine("h100")).schedule.program.steps
            counts = [sum(s == Step(Op.GATHER, i) for s in steps) for i in range(len(workload.units))]
            first.append(counts[0])
            expected += [] if compiled else [counts]
    assert first == [1, 2, 2, 2]
    assert run_ranks(2, gathers_of_a_step) == [expected] * 2
