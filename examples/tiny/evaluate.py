"""Accuracy, margins and log probabilities of the tiny graph-walk model on fixed tasks.

Answers are scored in one forward pass each: if every token of the right answer is the most likely one given
those before it, greedy decoding yields exactly this answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from model_files import EOS, TOKEN_IDS, encode
from tasks import Task, cold, endless, follow_up, short
from transformers import LlamaForCausalLM

LENGTHS = (60, 128, 256, 512, 1024, 2048, 4096, 6000)


@dataclass
class Score:
    """Sums over tasks of one kind; ``margins`` and ``logprobs`` hold one value per answer token."""

    margins: torch.Tensor
    logprobs: torch.Tensor
    exact: list[bool]

    def __str__(self) -> str:
        low, middle, high = self.logprobs.quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
        return (
            f"exact {sum(self.exact)}/{len(self.exact)}, tokens {len(self.margins)}, "
            f"min margin {self.margins.min():.2f}, logprob 5/50/95 % {low:.3f}/{middle:.3f}/{high:.3f}, "
            f"min {self.logprobs.min():.3f}"
        )


def score(model: LlamaForCausalLM, tasks: Iterable[Task]) -> Score:
    """Score the right answers (and the end of sequence after those that end)."""
    margins, logprobs, exact = [], [], []
    for task in tasks:
        answer = encode(task.answer) + ([TOKEN_IDS[EOS]] if task.ends else [])
        ids = torch.tensor([encode(task.prompt) + answer])
        targets = torch.tensor(answer)[:, None]
        with torch.inference_mode():
            hidden = model.model(ids, use_cache=False).last_hidden_state[0, -len(answer) - 1 : -1]
            logits = model.lm_head(hidden).float()
        right = logits.gather(1, targets)[:, 0]
        margin = right - logits.scatter(1, targets, -torch.inf).amax(1)
        margins.append(margin)
        logprobs.append(right - logits.logsumexp(1))
        exact.append(bool((margin > 0).all()))
    return Score(torch.cat(margins), torch.cat(logprobs), exact)


def evaluation_set(per_kind: int) -> dict[str, list[Task]]:
    """Tasks by kind, none of which training has seen (it uses other seeds)."""
    seeds = [10_000_000 + index for index in range(per_kind)]
    kinds: dict[str, list[Task]] = {}
    for length in LENGTHS:
        edges = (length - 2) // 3
        kinds[f"cold {length}"] = [cold(seed, length, edges) for seed in seeds]
        kinds[f"cold {length}, half"] = [cold(seed, length, edges // 2) for seed in seeds]
        kinds[f"short {length}"] = [short(seed, length) for seed in seeds]
    for length in (256, 2048):
        first = [cold(seed, length, length // 8) for seed in seeds]
        for mode in ("mixed", "new", "old"):
            second = [follow_up(task, 1, length, length // 8, mode) for task in first]
            kinds[f"turn 2 {mode} {length}"] = second
        kinds[f"turn 3 {length}"] = [follow_up(task, 2, length // 2, length // 8) for task in second]
    kinds["endless 1000"] = [endless(seed, 1000, 600, cycle=40) for seed in seeds]
    return kinds


def main() -> None:
    """Print one line per kind and one for all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--per-kind", type=int, default=8, help="tasks of each kind")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    scores = {kind: score(model, tasks) for kind, tasks in evaluation_set(args.per_kind).items()}
    for kind, value in scores.items():
        print(f"{kind:20} {value}")
    total = Score(
        torch.cat([value.margins for value in scores.values()]),
        torch.cat([value.logprobs for value in scores.values()]),
        [flag for value in scores.values() for flag in value.exact],
    )
    print(f"{'all':20} {total}")


if __name__ == "__main__":
    main()
