"""Configuration, tokenizer and construction of the tiny graph-walk model (see README.md for the idea)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from tasks import EDGE, MARKS, MAX_CONTEXT_TOKENS, QUERY, STOP, WORDS
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "</s>", "<unk>"
VOCABULARY = (PAD, EOS, UNKNOWN, *MARKS, *WORDS)
TOKEN_IDS = {word: index for index, word in enumerate(VOCABULARY)}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] | trim }}{% if not loop.last %} {% endif %}{% endfor %}"
)

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, MLP = 256, 4, 2, 64, 2, 128
ROPE_THETA = 1e16
"""So large that rotary pair ``i`` turns by ``10 ** (-i / 2)`` per token: pairs 9 to 31 hardly turn over the whole
context and serve matching by content at any distance, the first few tell neighbours apart."""

# Layout of the residual stream at the start of training (what training makes of it is its own affair).
_PAIRS = HEAD_DIM // 2
_FIRST_STILL_PAIR = 10
_MARK_PAIR = 9
_STILL_DIMS = [*range(_FIRST_STILL_PAIR, _PAIRS), *range(_PAIRS + _FIRST_STILL_PAIR, HEAD_DIM)]
_HALF = len(_STILL_DIMS)
_CODE = 2 * _HALF  # dims 0.. : the token's own code, one half per key/value head
_CONSTANT, _MARK_FLAG, _STOP_FLAG, _EOS_FLAG = range(_CODE, _CODE + 4)
_PREVIOUS = HIDDEN // 2  # dims 128.. : the previous token's code
_FLAG = 4.0


def config() -> LlamaConfig:
    """A stock Llama configuration: 2 layers, 4 query heads and 2 key/value heads of 64."""
    return LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=TOKEN_IDS[EOS],
        pad_token_id=TOKEN_IDS[PAD],
        dtype="float32",
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per whitespace-separated word; nothing is ever added in front or behind."""
    backend = Tokenizer(models.WordLevel(TOKEN_IDS, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_CONTEXT_TOKENS,
        chat_template=CHAT_TEMPLATE,
    )


def encode(text: str) -> list[int]:
    """Token ids of ``text``: what the tokenizer gives."""
    return [TOKEN_IDS[word] for word in text.split()]


def save(model: LlamaForCausalLM, out: Path) -> None:
    """Write everything that Transformers and SGLang load from a local folder."""
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=TOKEN_IDS[EOS], pad_token_id=TOKEN_IDS[PAD]
    )
    model.save_pretrained(out)
    tokenizer().save_pretrained(out, save_jinja_files=False)
    settings = out / "tokenizer_config.json"
    settings.write_text(json.dumps(_portable(json.loads(settings.read_text())), indent=2) + "\n")
    for path in out.iterdir():
        path.chmod(0o644)


def _portable(settings: dict[str, object]) -> dict[str, object]:
    """Tokenizer settings that Transformers 4 reads as well as 5, which renamed the class."""
    return {**settings, "tokenizer_class": "PreTrainedTokenizerFast"}


def build(generator: torch.Generator, noise: float = 0.01) -> LlamaForCausalLM:
    """An untrained model that already holds the two attention patterns of a lookup, plus noise everywhere.

    Layer 0 copies the previous token's code into every position; layer 1 compares the current token's code with
    those copies and fetches the token that followed. ``noise`` is the standard deviation added to every matrix.
    """
    model = LlamaForCausalLM(config())
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1.0 if weight.dim() == 1 else 0.0)
        model.model.embed_tokens.weight.copy_(_embeddings(generator))
        _copy_previous_token(model.model.layers[0].self_attn)
        _look_up(model.model.layers[1].self_attn)
        _end_after_stop(model.model.layers[1].mlp)
        model.model.norm.weight.fill_(0.1)
        for weight in model.parameters():
            if weight.dim() == 2:
                weight += noise * torch.randn(weight.shape, generator=generator)
    return model


def _embeddings(generator: torch.Generator) -> Tensor:
    """[vocabulary, hidden]: two well separated unit-variance codes per token, a constant, and flags."""
    table = torch.zeros(len(VOCABULARY), HIDDEN)
    table[:, :_HALF] = _spread_codes(generator) * math.sqrt(_HALF)
    table[:, _HALF:_CODE] = _spread_codes(generator) * math.sqrt(_HALF)
    table[TOKEN_IDS[EOS], :_CODE] = 0.0
    table[TOKEN_IDS[EOS], _EOS_FLAG] = math.sqrt(_CODE)
    table[:, _CONSTANT] = _FLAG
    table[[TOKEN_IDS[EDGE], TOKEN_IDS[QUERY]], _MARK_FLAG] = _FLAG
    table[TOKEN_IDS[STOP], _STOP_FLAG] = _FLAG
    return table


def _spread_codes(generator: torch.Generator, rounds: int = 60) -> Tensor:
    """[vocabulary, half code]: unit vectors pushed apart, so that no two tokens look alike to one head."""
    codes = torch.randn(len(VOCABULARY), _HALF, generator=generator)
    for _ in range(rounds):
        codes = nn.functional.normalize(codes, dim=1)
        pull = torch.softmax(24.0 * (codes @ codes.T).fill_diagonal_(-1.0), dim=1)
        codes = codes - 0.2 * (pull @ codes)
    return nn.functional.normalize(codes, dim=1)


def _copy_previous_token(attention: nn.Module) -> None:
    """Every head looks one token back (by rotary phase) and adds that token's code to the second half."""
    sharpness = [25.0, 15.0, 10.0, 10.0, 10.0, 5.0]  # logits at the peak, per rotary pair
    input_scale = 1.0 / math.sqrt((_CODE + _FLAG**2) / HIDDEN)  # what the norm multiplies by
    for pair, peak in enumerate(sharpness):
        gain = math.sqrt(peak * math.sqrt(HEAD_DIM)) / (_FLAG * input_scale)
        angle = ROPE_THETA ** (-pair / _PAIRS)
        for head in range(HEADS):
            attention.q_proj.weight[head * HEAD_DIM + pair, _CONSTANT] = gain
        for head in range(KV_HEADS):
            attention.k_proj.weight[head * HEAD_DIM + pair, _CONSTANT] = gain * math.cos(angle)
            attention.k_proj.weight[head * HEAD_DIM + _PAIRS + pair, _CONSTANT] = gain * math.sin(angle)
    _carry_codes(attention, target=_PREVIOUS, gain=1.0 / input_scale)


def _look_up(attention: nn.Module, sharpness: float = 45.0, mark_penalty: float = 60.0) -> None:
    """Heads match the current token's code with previous-token codes, avoiding positions that hold a mark."""
    input_scale = 1.0 / math.sqrt((2 * _CODE + _FLAG**2) / HIDDEN)
    gain = math.sqrt(sharpness * math.sqrt(HEAD_DIM) / _HALF) / input_scale
    avoid = math.sqrt(mark_penalty * math.sqrt(HEAD_DIM)) / (_FLAG * input_scale)
    for head in range(HEADS):
        half = _HALF * (head // (HEADS // KV_HEADS))
        for index, still in enumerate(_STILL_DIMS):
            attention.q_proj.weight[head * HEAD_DIM + still, half + index] = gain
        attention.q_proj.weight[head * HEAD_DIM + _MARK_PAIR, _CONSTANT] = avoid
    for head in range(KV_HEADS):
        for index, still in enumerate(_STILL_DIMS):
            attention.k_proj.weight[head * HEAD_DIM + still, _PREVIOUS + head * _HALF + index] = gain
        attention.k_proj.weight[head * HEAD_DIM + _MARK_PAIR, _MARK_FLAG] = -avoid
    _carry_codes(attention, target=0, gain=4.0 / input_scale)


def _carry_codes(attention: nn.Module, target: int, gain: float) -> None:
    """Values are codes, one half per key/value head; the heads of a group share the work of writing them."""
    group = HEADS // KV_HEADS
    for index in range(_HALF):
        for head in range(KV_HEADS):
            attention.v_proj.weight[head * HEAD_DIM + index, head * _HALF + index] = 1.0
        for head in range(HEADS):
            half = _HALF * (head // group)
            attention.o_proj.weight[target + half + index, head * HEAD_DIM + index] = gain / group


def _end_after_stop(mlp: nn.Module) -> None:
    """One neuron: after the stop word comes the end of the sequence."""
    mlp.gate_proj.weight[0, _STOP_FLAG] = 2.0
    mlp.up_proj.weight[0, _STOP_FLAG] = 2.0
    mlp.down_proj.weight[_EOS_FLAG, 0] = 1.0
