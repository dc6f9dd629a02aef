"""Stop strings: what draws, what reads and vLLM agree on where each completion ends."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from cases import tiny_model
from engines import has_vllm

import funcrl
from funcrl.config import Sampling
from funcrl.generators.stops import cut_at_stop, find_stop, has_stop_string
from funcrl.loop.rollouts.draw import complete
from funcrl.tasks import Prompt

# Few characters, several a token, none at all, and one that is two bytes of two tokens.
PIECES = [b"\n", b"\n\n", b"a", b"ab", b"", b"ba\n", "é".encode()[:1], "é".encode()[1:]]


def decode(tokens):
    return b"".join(PIECES[token] for token in tokens).decode(errors="replace")


def whole_characters(tokens):
    """The pieces' text as one string a token, of whole characters alone."""
    return "".join(PIECES[token].decode() for token in tokens)


def cases(count, pieces):
    """Random completions, with stop strings that are likely to be among them."""
    draw = random.Random(0)
    for _ in range(count):
        tokens = draw.choices(range(pieces), k=draw.randint(1, 14))
        alphabet = "\nab" if pieces <= 6 else "\nabé"
        stop = tuple(
            "".join(draw.choices(alphabet, k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3))
        )
        yield tokens, Sampling(stop=stop, min_tokens=draw.randint(0, 5))


def drawn(tokens, sampling):
    """What a sampler keeps of the tokens that it would draw: up to the first stop string."""
    ends = (n for n in range(1, len(tokens) + 1) if has_stop_string(tokens[:n], sampling, decode))
    return tokens[: next(ends, len(tokens))]


def test_three_newlines_end_where_the_second_pair_of_them_does():
    sampling = Sampling(stop=("\n\n",), min_tokens=2)
    assert [has_stop_string([0] * n, sampling, decode) for n in (1, 2, 3)] == [False, False, True]
    assert cut_at_stop([0, 0, 0], sampling, decode) == ("\n", "\n\n")


@pytest.mark.slow
def test_what_draws_and_what_reads_agree():
    """On every cut: the last token that is drawn is the one in which the read stop string ends."""
    stopped = 0
    for tokens, sampling in cases(4000, len(PIECES)):
        kept = drawn(tokens, sampling)
        text, stop = cut_at_stop(kept, sampling, decode)
        ended = has_stop_string(kept, sampling, decode)
        assert bool(stop) == ended, (tokens, sampling)
        assert decode(kept).startswith(text + stop)
        if ended:
            stopped += 1
            assert len(kept) > sampling.min_tokens
            assert not decode(kept[:-1]).startswith(text + stop)
        # Whatever follows, from a generator that does not know of stop strings, is not read.
        if kept != tokens and not decode(kept).endswith("\ufffd"):
            assert cut_at_stop(tokens, sampling, decode) == (text, stop)
    assert stopped > 1000


def test_the_first_stop_string_to_end_is_what_a_look_after_each_character_finds():
    for tokens, sampling in cases(2000, 6):
        text = whole_characters(tokens)
        early = len(whole_characters(tokens[: sampling.min_tokens]))
        wanted = (text, "")
        for end in range(early + 1, len(text) + 1):
            ending = [stop for stop in sampling.stop if text[:end].endswith(stop)]
            if ending:
                wanted = (text[: end - len(ending[0])], ending[0])
                break
        assert cut_at_stop(tokens, sampling, decode) == wanted, (tokens, sampling)


def test_a_long_last_token_and_tokens_without_text_hide_no_stop_string():
    """The stop string begins before the last few tokens."""
    texts = {0: "x", 1: "", 2: "bc and then a long way more", 3: "a"}

    def spell(tokens):
        return "".join(texts[token] for token in tokens)

    sampling = Sampling(stop=("abc",))
    assert has_stop_string([0] * 9 + [3] + [1] * 9 + [2], sampling, spell)
    assert not has_stop_string([0] * 9 + [1] * 9 + [2], sampling, spell)


def test_nothing_is_found_without_stop_strings_or_text():
    assert find_stop("ab", 0, ()) is None
    assert not has_stop_string([0], Sampling(), decode)
    assert not has_stop_string([0], Sampling(stop=("\n",)), None)
    assert cut_at_stop([], Sampling(stop=("\n",)), decode) == ("", "")


@pytest.mark.parametrize("min_tokens", [0, 2, 5])
def test_a_sampler_ends_where_its_completions_are_cut(min_tokens):
    """The real sampler, read by `complete`, with a tokenizer of few characters."""
    model = tiny_model(vocab_size=len(PIECES) + 1)
    end = len(PIECES)
    tokenizer = SimpleNamespace(
        end=end, vocab_size=end + 1, encode=lambda text: [0] * len(text), decode=decode
    )
    task = SimpleNamespace(name="newlines", tokenizer=tokenizer, prompts=list, reward=dict)
    sampling = Sampling(64, max_tokens=20, min_tokens=min_tokens, stop=("\n\n", "ab", "a\n"))
    generator = funcrl.generators.Sampler(model, decode=decode)
    generator.push(funcrl.init_params(model, seed=0))
    completed = complete(task, generator, [Prompt("?"), Prompt("??")], sampling, seed=3)
    lengths = completed.samples.mask.sum(dim=1).tolist()
    whole = replace(sampling, stop_tokens=(end,))
    reasons = []
    for row, length in enumerate(lengths):
        tokens = completed.samples.tokens[row, :length].tolist()
        said = tokens[:-1] if tokens[-1] == end else tokens
        text, stop = cut_at_stop(said, whole, decode)
        assert completed.texts[row] == text
        by_string = completed.samples.finish_reasons[row] == "stop" and tokens[-1] != end
        assert bool(stop) == by_string
        assert drawn(said, whole) == said
        reasons.append(by_string)
    assert 20 < sum(reasons) < 128


@pytest.mark.vllm
@has_vllm
@pytest.mark.filterwarnings("default")  # vLLM and what it imports warn of their own affairs
def test_vllm_ends_completions_at_the_same_places():
    """vLLM's own search, fed one token at a time, for tokens of whole characters."""
    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer

    class Detokenizer(BaseIncrementalDetokenizer):
        def decode_next(self, next_token_id):
            return decode([next_token_id])

    for tokens, sampling in cases(2000, 6):
        asked = SamplingParams(stop=list(sampling.stop), min_tokens=sampling.min_tokens)
        theirs = Detokenizer(SimpleNamespace(sampling_params=asked))
        found = next((stop for token in tokens if (stop := theirs.update([token], False))), None)
        kept = drawn(tokens, sampling)
        assert theirs.token_ids == kept, (tokens, sampling)
        assert (theirs.output_text, found or "") == cut_at_stop(kept, sampling, decode)
