"""Documents in one sequence keep apart, in every architecture that is accepted; the others are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lamina
from architectures.models import ARCHITECTURES
from lamina.core.control import Control
from lamina.train.objective import NextToken
from lamina.train.separation import check_separation

CPU = torch.device("cpu")
ALONE = Control(None, 0, 1, "train")
PACKED = ["llama", "qwen3", "gemma3", "phi", "gpt2"]
ROUTED = ["qwen3-moe", "deepseek-v3", "mixtral"]  # which choose experts in fp32 in any model
REFUSED = ["gpt-oss", "mamba"]  # a mask that is made without positions, a state that runs on
SIZES = (9, 1, 11, 3, 8)  # of documents; longer and shorter than the windows of 8 that some of them have


def objective(name: str, dtype: torch.dtype = torch.float64) -> NextToken:
    """With logits that differ much."""
    model: Any = ARCHITECTURES[name].build().eval()
    if name in PACKED:
        model.set_attn_implementation("sdpa")  # whose softmax has the dtype of the model
    return NextToken(enlarged(model).to(dtype))


def enlarged(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(6.0)
    return model


def tried(of: NextToken, packed: bool = True) -> None:
    wide = next(of.model.parameters()).dtype != torch.bfloat16
    check_separation(of, packed, wide, ALONE, CPU)


@pytest.mark.parametrize("name", [*PACKED, *ROUTED])
def test_packed_logits_are_those_of_each_document_alone(name: str) -> None:
    of = objective(name)
    tried(of)
    tried(objective(name, torch.bfloat16))
    tolerance = 1e-12 if name in PACKED else 1e-6
    tokens = torch.randint(5, 40, (2, sum(SIZES)), generator=torch.Generator().manual_seed(2))
    sizes = [SIZES, SIZES[::-1]]  # the two sequences of the batch are cut at other places
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in sizes])
    with torch.no_grad():
        together = of.logits(tokens, positions)
        for row in range(2):
            parts = zip(tokens[row].split(sizes[row]), together[row].split(sizes[row]), strict=True)
            for document, packed in parts:
                alone = of.logits(document.view(1, -1), torch.arange(len(document)).view(1, -1))[0]
                assert (packed - alone).abs().max() < tolerance
        assert (of.logits(tokens) - together).abs().max() > 0.01, "otherwise nothing was masked"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_documents_is_refused_and_goes_padded(name: str, dtype: torch.dtype) -> None:
    of = objective(name, dtype)
    with pytest.raises(lamina.UsageError, match="documents apart.*--packing padded"):
        tried(of)
    tried(of, packed=False)


class Fading(nn.Module):
    """A tower of attention that is masked, and beside it a state that runs on, a hundred times fainter."""

    def __init__(self, share: float, ahead: float = 0.0) -> None:
        super().__init__()
        self.inner = objective("llama").model
        self.share, self.ahead = share, ahead

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False) -> Any:
        output = self.inner(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)
        logits = output.logits
        output.logits = logits + self.share * logits.cumsum(1) + self.ahead * logits.flip(1).cumsum(1).flip(1)
        return output


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_faint_mixture_is_found(dtype: torch.dtype) -> None:
    """Fainter than what rounding in 16 bits would excuse."""
    tried(NextToken(Fading(0.0).to(dtype)))
    with pytest.raises(lamina.UsageError, match="documents apart"):
        tried(NextToken(Fading(0.01).to(dtype)))


@pytest.mark.parametrize("packed", [True, False])
def test_a_model_that_reads_ahead_is_refused(packed: bool) -> None:
    import transformers

    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    for is_decoder in (False, True):
        config = transformers.BertConfig(num_attention_heads=4, is_decoder=is_decoder, **sizes)
        of = NextToken(enlarged(transformers.BertLMHeadModel(config)).eval())
        if is_decoder and not packed:
            tried(of, packed)
            continue
        with pytest.raises(lamina.UsageError, match="documents apart" if is_decoder else "follow.*is_decoder"):
            tried(of, packed)
    with pytest.raises(lamina.UsageError, match="tokens that follow"):
        tried(NextToken(Fading(0.0, ahead=1e-3)), packed)
