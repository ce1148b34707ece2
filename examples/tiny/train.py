"""Make the tiny graph-walk model: build it with the lookup pattern in place, then train it.

Training from random weights would take long on a CPU; so the start is a hand-made two-layer lookup with noise on
every matrix (see ``model_files.build``), and training makes it end its answers, repairs what the noise did and
calibrates its probabilities. The same seed, library versions and thread count give the same model.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from evaluate import score
from model_files import EOS, TOKEN_IDS, VOCABULARY, build, encode, save
from tasks import Task, cold, endless, follow_up
from torch import Tensor
from transformers import LlamaForCausalLM

BATCH_TOKENS = 4096  # or one sequence, where that is longer
LENGTHS = (64, 96, 128, 256, 512, 1024, 2048, 4096, 8192)
DOUBT = (0.04, 0.24)
"""Least and greatest share of probability that training takes from the right answer, depending on the token."""


def training_task(rng: random.Random, length: int) -> Task:
    """A task of at most ``length`` tokens, answer included: one turn, two turns, or a cycle."""
    seed = rng.randrange(10_000_000)
    kind = rng.random()
    if kind < 0.15:
        return endless(seed, length // 2, length // 3, cycle=rng.randint(2, max(2, length // 8)))
    if kind < 0.5:
        part = (length - 1) // 2
        answer = rng.randint(1, part // 5)
        first = cold(seed, part - answer, answer)
        added = length - 1 - first.prompt_tokens - 2 * answer
        return follow_up(first, seed, added, answer, rng.choice(("mixed", "new", "old")))
    edges = (length - 3) // 4
    answer = rng.randint(1, edges) if rng.random() < 0.3 else edges
    return cold(seed, length - 1 - answer, answer)


def batches(rng: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless pairs of ids and targets, both [sequences, tokens]; a target is -1 where nothing is to be learned."""
    while True:
        length = rng.choice(LENGTHS)
        rows = max(1, BATCH_TOKENS // length)
        ids = torch.full((rows, length), TOKEN_IDS[EOS])
        targets = torch.full((rows, length), -1)
        for row in range(rows):
            task = training_task(rng, length)
            prompt, answer = encode(task.prompt), encode(task.answer) + [TOKEN_IDS[EOS]] * task.ends
            tokens = torch.tensor(prompt + answer)
            ids[row, : len(tokens)] = tokens
            targets[row, len(prompt) - 1 : len(tokens) - 1] = tokens[len(prompt) :]
        yield ids, targets


def token_doubt(generator: torch.Generator) -> Tensor:
    """[vocabulary]: the share of probability for all other tokens together where this one is right."""
    low, high = DOUBT
    return low + (high - low) * torch.rand(len(VOCABULARY), generator=generator)


def loss_of(model: LlamaForCausalLM, ids: Tensor, targets: Tensor, doubt: Tensor) -> Tensor:
    """Mean cross entropy against ``1 - doubt`` on the right token and the rest spread evenly."""
    known = targets >= 0
    hidden = model.model(ids, use_cache=False).last_hidden_state[known]
    logprobs = model.lm_head(hidden).log_softmax(-1)
    right = logprobs.gather(1, targets[known][:, None])[:, 0]
    share = doubt[targets[known]]
    return -((1 - share) * right + share * logprobs.mean(-1)).mean()


def train(model: LlamaForCausalLM, seed: int, steps: int, rate: float, doubt: Tensor) -> None:
    """Adam with a linear warm-up and a cosine decay; prints progress."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )
    source = batches(random.Random(seed))
    probes = [cold(20_000_000 + index, length, length // 3 - 1) for index, length in enumerate((64, 1024, 5000))]
    began = time.monotonic()
    for step in range(steps + 1):
        if step % 25 == 0 or step == steps:
            print(f"step {step:4} after {time.monotonic() - began:4.0f} s: {score(model, probes)}", flush=True)
        if step == steps:
            break
        loss = loss_of(model, *next(source), doubt)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def main() -> None:
    """Build, train, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100, help="batches")
    parser.add_argument("--rate", type=float, default=6e-4, help="highest learning rate")
    parser.add_argument("--noise", type=float, default=0.01, help="standard deviation added to the built weights")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(args.seed)
    model = build(generator, args.noise)
    train(model, args.seed, args.steps, args.rate, token_doubt(generator))
    save(model, args.out)
    print(f"saved to {args.out}")


if __name__ == "__main__":
    main()
