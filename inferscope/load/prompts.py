"""Prompts of about a given number of tokens, made of plain words.

The words are short and common: each with its leading space is one token of every large vocabulary,
so that the word count is a fair estimate if the server cannot be asked. Shared text comes first,
directly followed by words unique to the request: a prefix cache finds exactly the shared text.
"""

from __future__ import annotations

from random import Random

from inferscope.load.workload import Sections

_TEXT = """
the and that have for not with you this but his from they say her she will one all would there
their what out about who get which when make can like time just him know take people into year
your good some could them see other than then now look only come its over think also back after
use two how our work first well way even new want because any these give day most us great where
much before right too mean old same tell boy follow came show around form three small set put
end does another large must big such turn here why ask went men read need land different home
move try kind hand picture again change off play spell air away animal house point page letter
mother answer found study still learn should world high every near add food between own below
country plant last school father keep tree never start city earth eye light thought head under
story saw left few while along might close something seem next hard open example begin life
always those both paper together got group often run important until children side feet car
mile night walk white sea began grow took river four carry state once book hear stop without
second later miss idea enough eat face watch far really almost let above girl sometimes
mountain cut young talk soon list song being leave family body music color stand sun question
"""
WORDS = tuple(_TEXT.split())
_STREAM_WORDS = 1 << 14
_UNIQUE_WORDS = 6
"""Number of words, out of 243: two of a million requests are unlikely to begin alike."""


class WordPrompts:
    """Generator of prompts of a given length, some with a shared prefix.

    Attributes:
        tokens_per_word: assumed tokens of a word.
    """

    def __init__(
        self,
        random: Random,
        *,
        tokens_per_word: float,
        template_tokens: int = 0,
        shared_tokens: int = 0,
        share: float = 0.0,
    ) -> None:
        """Draw the text that prompts are cut from.

        Args:
            random: source of all choices.
            tokens_per_word: mean tokens of a word, of the server's tokenizer.
            template_tokens: tokens that the server's chat template adds to each prompt.
            shared_tokens: length of the common prefix, in addition to a prompt's own length.
            share: share of requests with that prefix, 0..1.
        """
        self._random = random
        self.tokens_per_word = tokens_per_word
        self._template_tokens = template_tokens
        self._share = share
        self._stream = random.choices(WORDS, k=_STREAM_WORDS)
        # The number of draws for the prefix depends on the tokenizer; later draws must not.
        prefix_random = Random(random.getrandbits(64))
        self._shared = prefix_random.choices(WORDS, k=self._num_words(shared_tokens))

    def prompt(self, num_tokens: int) -> tuple[str, Sections]:
        """Return a prompt of about this many tokens, and its sections.

        A share of them follows the common prefix, their `system` section.
        """
        random = self._random
        shared = self._shared if random.random() < self._share else []
        num_words = max(1, self._num_words(num_tokens - self._template_tokens))
        words = random.choices(WORDS, k=_UNIQUE_WORDS)[:num_words]
        start = random.randrange(_STREAM_WORDS)
        while len(words) < num_words:
            words += self._stream[start : start + num_words - len(words)]
            start = 0
        text = " ".join([*shared, *words])
        if not shared:
            return text, (("user", len(text)),)
        num_shared = sum(map(len, shared)) + len(shared)
        return text, (("system", num_shared), ("user", len(text) - num_shared))

    def _num_words(self, num_tokens: int) -> int:
        return max(0, round(num_tokens / self.tokens_per_word))
