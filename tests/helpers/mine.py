"""What a stranger brings: networks, an algorithm, an optimizer and a generator."""

import torch
import transformers
from torch import nn

import funcrl


class Policy(nn.Module):
    """A recurrent policy."""

    def __init__(self, vocab_size):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 16)
        self.cell = nn.GRUCell(16, 16)
        self.out = nn.Linear(16, vocab_size)

    def forward(self, tokens):
        rows = self.embed(tokens)
        state = torch.zeros_like(rows[0])
        states = [state := self.cell(row, state) for row in rows]
        return self.out(torch.stack(states))


def llama(vocab_size):
    shape = transformers.LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(shape)


def gpt2(vocab_size):
    shape = transformers.GPT2Config(
        vocab_size=vocab_size, n_embd=16, n_layer=1, n_head=2, n_positions=64,
        bos_token_id=0, eos_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(shape)


def maxrl(**tunables):
    """MaxRL (arXiv:2602.02710): a group's rewards relative to their mean."""

    def advantage(rewards):
        return (rewards - rewards.mean()) / rewards.mean().clamp(min=1e-6)

    return funcrl.grpo(scale_rewards=funcrl.advantages.by_group(advantage), **tunables)


def signed(learning_rate):
    """The sign of each gradient, times the learning rate."""
    sign = funcrl.optim.stateless(lambda grads, params: funcrl.tree.map(torch.sign, grads))
    return funcrl.optim.chain(sign, funcrl.optim.scale_by_learning_rate(learning_rate))


def slowly(model, decode):
    """Draws from any network without a cache."""
    return funcrl.generators.Recompute(model, decode=decode)
