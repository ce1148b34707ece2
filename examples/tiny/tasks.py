"""Seeded prompts with answers known in advance, for the tiny graph-walk model (pure Python, no torch).

A prompt is a shuffled list of edges followed by a query; the answer is the walk from the queried word::

    ; tako mire ; luda . ; peso tako ; mire luda # peso   ->   tako mire luda .

Every word has at most one outgoing edge, so the answer is unique. Every answer token has to be looked up
at another place of the context: losing or altering any edge of the walk changes the answer. A walk closes
with the word ``.``, after which the model emits its end-of-sequence token (not part of the answer text);
a walk in a cycle never closes. Every word and every mark is exactly one token, so all sizes here are in
tokens and equal ``len(text.split())``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

EDGE, QUERY, STOP = ";", "#", "."
MARKS = (EDGE, QUERY, STOP)
MAX_CONTEXT_TOKENS = 8192
MODES = ("mixed", "new", "old")

_CONSONANTS = "bdfgklmnprstv"
_VOWELS = "aeiou"
_WORD_COUNT = 3066
_WORD_START, _WORD_STRIDE = 3300, 2734  # the stride is coprime to the 4225 two-syllable words: all differ
_MAX_LOOSE = 8
_MAX_OLD_CHAINS = 3


def _vocabulary() -> tuple[str, ...]:
    """All words of the model in token order: two consonant-vowel syllables each."""
    syllables = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
    total = len(syllables) ** 2
    picks = (((_WORD_START + index) * _WORD_STRIDE) % total for index in range(_WORD_COUNT))
    return tuple(syllables[pick // len(syllables)] + syllables[pick % len(syllables)] for pick in picks)


WORDS = _vocabulary()


@dataclass(frozen=True)
class Task:
    """One question with its known answer, and what a follow-up turn needs to know.

    ``prompt`` is the whole text to complete (earlier turns included) and ``turn`` the part this turn added:
    the user message in chat form. ``prompt + " " + answer`` is the prefix of every follow-up.
    """

    prompt: str
    turn: str
    answer: str
    messages: tuple[tuple[str, str], ...]
    """Chat form of ``prompt``: (role, content) pairs, the last one being this turn's user message."""
    walk: tuple[str, ...]
    """The queried word followed by the answer's words."""
    loose: tuple[tuple[str, ...], ...] = ()
    """Distractor chains whose last word has no edge yet, so that a follow-up may extend them."""
    used: frozenset[str] = frozenset()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt.split())

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answer; the model emits one more, end-of-sequence, if the answer ends in ``.``."""
        return len(self.answer.split())

    @property
    def ends(self) -> bool:
        """Whether the walk closes by itself (else only a token limit stops the model)."""
        return self.walk[-1] == STOP

    def chat(self) -> list[dict[str, str]]:
        """``messages`` as the chat completions API takes them."""
        return [{"role": role, "content": content} for role, content in self.messages]


def cold(seed: int, prompt_tokens: int, answer_tokens: int) -> Task:
    """First turn: a prompt of exactly ``prompt_tokens``, an answer of exactly ``answer_tokens`` (with ``.``)."""
    edges, padding = _edge_budget("prompt_tokens", prompt_tokens)
    _check_range("answer_tokens", answer_tokens, 1, edges)
    _check_context(prompt_tokens, answer_tokens + 1)
    rng = _rng("cold", seed, prompt_tokens, answer_tokens)
    fresh = _fresh_words(rng, frozenset())
    walk = (*_take(fresh, answer_tokens), STOP)
    chains, loose = _distractors(rng, fresh, edges - answer_tokens)
    turn = _render(rng, [walk, *chains], padding, walk[0])
    return Task(turn, turn, " ".join(walk[1:]), (("user", turn),), walk, loose, _words_of(walk, *chains))


def short(seed: int, prompt_tokens: int) -> Task:
    """First turn with an answer of one to four tokens, as many as ``seed`` says."""
    edges, _ = _edge_budget("prompt_tokens", prompt_tokens)
    return cold(seed, prompt_tokens, min(edges, 1 + seed % 4))


def endless(seed: int, prompt_tokens: int, answer_tokens: int, cycle: int | None = None) -> Task:
    """First turn whose walk runs round a cycle of ``cycle`` words (default: a third of the answer).

    The answer holds the first ``answer_tokens`` tokens; the model would go on until its token limit.
    """
    edges, padding = _edge_budget("prompt_tokens", prompt_tokens)
    cycle = max(2, min(edges, answer_tokens // 3)) if cycle is None else cycle
    _check_range("cycle", cycle, 2, edges)
    _check_range("answer_tokens", answer_tokens, 1, MAX_CONTEXT_TOKENS)
    _check_context(prompt_tokens, answer_tokens)
    rng = _rng("endless", seed, prompt_tokens, answer_tokens, cycle)
    fresh = _fresh_words(rng, frozenset())
    lap = _take(fresh, cycle)
    chains, loose = _distractors(rng, fresh, edges - cycle)
    turn = _render(rng, [(*lap, lap[0]), *chains], padding, lap[0])
    walk = tuple(lap[index % cycle] for index in range(answer_tokens + 1))
    return Task(turn, turn, " ".join(walk[1:]), (("user", turn),), walk, loose, _words_of(lap, *chains))


def follow_up(
    task: Task,
    seed: int,
    added_tokens: int,
    answer_tokens: int,
    mode: str = "mixed",
    answered: str | None = None,
) -> Task:
    """Next turn of a conversation: the prompt, the answer, and ``added_tokens`` of new edges and a query.

    ``mode`` says which edges the walk takes: ``new`` only this turn's; ``old`` the last ``answer_tokens`` of
    the previous turn's walk; ``mixed`` this turn's and earlier turns' (unasked so far) in alternation, as far as
    there are any. ``answered`` is the text really generated for ``task`` where that is not ``task.answer``
    (cut by a token limit, say). Seeds differing, follow-ups of one task share exactly its prefix.
    """
    edges, padding = _edge_budget("added_tokens", added_tokens)
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    history = task.answer if answered is None else " ".join(answered.split())
    _check_range("answer_tokens", answer_tokens, 1, MAX_CONTEXT_TOKENS)
    _check_context(task.prompt_tokens + len(history.split()) + added_tokens, answer_tokens + 1)
    rng = _rng("follow_up", task.prompt, seed, added_tokens, answer_tokens, mode)
    fresh = _fresh_words(rng, task.used)
    if mode == "old":
        walk, new_chains, kept = _old_walk(task, answer_tokens), [], task.loose
    else:
        walk, new_chains, kept = _new_walk(rng, fresh, task.loose if mode == "mixed" else (), answer_tokens)
        kept = kept if mode == "mixed" else task.loose
    spare = edges - sum(len(chain) - 1 for chain in new_chains)
    if spare < 0:
        raise ValueError(f"this walk needs added_tokens of at least {added_tokens - 3 * spare}, not {added_tokens}")
    chains, loose = _distractors(rng, fresh, spare)
    turn = _render(rng, [*new_chains, *chains], padding, walk[0])
    prompt = " ".join(part for part in (task.prompt, history, turn) if part)
    messages = (*task.messages, ("assistant", history), ("user", turn))
    used = task.used | _words_of(*new_chains, *chains)
    return Task(prompt, turn, " ".join(walk[1:]), messages, walk, kept + loose, used)


def solve(prompt: str, max_tokens: int = MAX_CONTEXT_TOKENS) -> str:
    """The right answer to any prompt of this form, found by following its edges (at most ``max_tokens``)."""
    tokens = prompt.split()
    if len(tokens) < 2 or tokens[-2] != QUERY:
        raise ValueError(f"a prompt ends in '{QUERY} word'")
    edges: dict[str, str] = {}
    for index in range(len(tokens) - 2):
        mark, key, value = tokens[index : index + 3]
        if mark == EDGE and key not in MARKS and value not in (EDGE, QUERY):
            edges[key] = value
    answer: list[str] = []
    word = tokens[-1]
    while word != STOP and len(answer) < max_tokens:
        if word not in edges:
            raise ValueError(f"the walk reaches {word!r}, which has no edge")
        word = edges[word]
        answer.append(word)
    return " ".join(answer)


def _rng(*key: object) -> random.Random:
    """A generator seeded by all of ``key`` (strings seed the same in every process)."""
    return random.Random("/".join(map(str, key)))


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low} to {high}, not {value}")


def _check_context(prompt_tokens: int, generated_tokens: int) -> None:
    total = prompt_tokens + generated_tokens
    if total > MAX_CONTEXT_TOKENS:
        raise ValueError(f"{total} tokens in all exceed the model's context of {MAX_CONTEXT_TOKENS}")


def _edge_budget(name: str, tokens: int) -> tuple[int, int]:
    """Edges that fit into a turn of ``tokens`` (three each, two for the query), and filler marks left over."""
    _check_range(name, tokens, 5, MAX_CONTEXT_TOKENS)
    return (tokens - 2) // 3, (tokens - 2) % 3


def _fresh_words(rng: random.Random, used: frozenset[str]) -> list[str]:
    """All unused words in random order."""
    words = [word for word in WORDS if word not in used]
    rng.shuffle(words)
    return words


def _take(fresh: list[str], count: int) -> tuple[str, ...]:
    """Remove and return ``count`` words."""
    if count > len(fresh):
        raise ValueError(f"the vocabulary is used up: {count} more words wanted, {len(fresh)} left")
    taken = tuple(fresh[len(fresh) - count :])
    del fresh[len(fresh) - count :]
    return taken


def _distractors(
    rng: random.Random, fresh: list[str], edges: int
) -> tuple[list[tuple[str, ...]], tuple[tuple[str, ...], ...]]:
    """Chains of ``edges`` edges in all that the walk does not visit, and those among them left loose."""
    longest = max(2, edges // _MAX_LOOSE)
    chains: list[tuple[str, ...]] = []
    loose: list[tuple[str, ...]] = []
    while edges:
        length = rng.randint(1, min(edges, longest))
        edges -= length
        if len(loose) < _MAX_LOOSE and len(fresh) > length:
            loose.append(_take(fresh, length + 1))
            chains.append(loose[-1])
        else:
            chains.append((*_take(fresh, length), STOP))
    return chains, tuple(loose)


def _old_walk(task: Task, answer_tokens: int) -> tuple[str, ...]:
    """The last ``answer_tokens`` steps of the walk of ``task``."""
    if not task.ends:
        raise ValueError("mode 'old' needs an earlier walk that ends")
    _check_range("answer_tokens", answer_tokens, 1, len(task.walk) - 1)
    return task.walk[-1 - answer_tokens :]


def _new_walk(
    rng: random.Random, fresh: list[str], loose: tuple[tuple[str, ...], ...], steps: int
) -> tuple[tuple[str, ...], list[tuple[str, ...]], tuple[tuple[str, ...], ...]]:
    """A walk of ``steps`` edges, half of them through old loose chains where those are long enough.

    Returns the walk, the chains of new edges it needs, and the loose chains it left alone.
    """
    count = min(len(loose), _MAX_OLD_CHAINS, (steps - 1) // 2)
    picked = rng.sample(loose, count)
    tails: list[tuple[str, ...]] = []
    budget = steps // 2
    for position, chain in enumerate(picked):
        length = min(len(chain) - 1, max(1, budget // (count - position)))
        budget -= length
        tails.append(chain[-1 - length :])
    new_edges = steps - sum(len(tail) - 1 for tail in tails)
    chains: list[tuple[str, ...]] = []
    start: tuple[str, ...] = ()
    walk: list[str] = []
    for position, tail in enumerate([*tails, (STOP,)]):
        length = new_edges // (count + 1) + (position < new_edges % (count + 1))
        chain = (*start, *_take(fresh, length - len(start)), tail[0])
        chains.append(chain)
        walk += [*chain[:-1], *tail[:-1]]
        start = (tail[-1],)
    return (*walk, STOP), chains, tuple(chain for chain in loose if chain not in picked)


def _render(rng: random.Random, chains: list[tuple[str, ...]], padding: int, query: str) -> str:
    """Text of one turn: filler marks, the chains' edges in random order, the query."""
    edges = [f"{EDGE} {key} {value}" for chain in chains for key, value in pairwise(chain)]
    rng.shuffle(edges)
    return " ".join([*[EDGE] * padding, *edges, QUERY, query])


def _words_of(*chains: tuple[str, ...]) -> frozenset[str]:
    return frozenset(word for chain in chains for word in chain if word != STOP)
