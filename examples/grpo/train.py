"""Trains a policy by GRPO: torchrun --nproc-per-node 2 examples/grpo/train.py

The actor continues prompts, a reward model scores the texts, and the actor learns to prefer those
that score above the mean of their group, without straying far from the reference.
"""

import copy
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import autopar

WORDS, PROMPT, LENGTH, PROMPTS, GROUP, STEPS, UPDATES = 32, 4, 12, 4, 4, 6, 2


class Reward(nn.Module):
    """Scores a text: the mean of what its words and their neighbours are worth."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.head = nn.Sequential(nn.Conv1d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 1, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.words(tokens).transpose(1, 2)).mean((1, 2))


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def scores(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability of every word after the prompt."""
    chosen = logits[:, PROMPT - 1 : -1].log_softmax(-1)
    return chosen.gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)


def loss_of(output: object, tokens: Tensor, before: Tensor, known: Tensor, gain: Tensor) -> Tensor:
    """The clipped gain of GRPO, and 0.04 times the divergence from the reference."""
    now = scores(output.logits, tokens)
    ratio = (now - before).exp()
    gained = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    strayed = (known - now).exp() - (known - now) - 1
    return (0.04 * strayed - gained).mean()


def sample(actor: nn.Module, prompts: Tensor, noise: Tensor) -> Tensor:
    """Continues prompts; adding Gumbel noise to logits draws words by their probabilities."""
    tokens = F.pad(prompts, (0, LENGTH - PROMPT))
    for place in range(PROMPT, LENGTH):
        logits = actor(input_ids=tokens).logits[:, place - 1]
        tokens[:, place] = (logits + noise[:, place - PROMPT]).argmax(-1)
    return tokens


def train() -> list[float]:
    torch.manual_seed(0)
    actor, reward = llama(), Reward().requires_grad_(False).eval()
    reference = copy.deepcopy(actor).requires_grad_(False).eval()
    texts = torch.zeros(PROMPTS * GROUP, LENGTH, dtype=torch.long)
    figures = dict.fromkeys(("before", "known"), torch.zeros(len(texts), LENGTH - PROMPT))
    batch = {"input_ids": texts, "tokens": texts, **figures, "gain": torch.zeros(len(texts), 1)}
    adam = partial(torch.optim.AdamW, lr=1e-2)
    models = {
        "actor": {"model": actor, "optimizer": adam, "loss_fn": loss_of, "example_inputs": batch},
        "reference": {"model": reference, "example_inputs": {"input_ids": texts}},
        "reward": {"model": reward, "example_inputs": texts},
    }
    actor, reference, reward = autopar.compile_together(models, "cpu: data=2").values()
    draw, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        prompts = torch.randint(WORDS, (PROMPTS, PROMPT), generator=draw)
        uniform = torch.rand(PROMPTS * GROUP, LENGTH - PROMPT, WORDS, generator=draw)
        prompts = prompts.repeat_interleave(GROUP, 0)
        noise = -(-uniform.log()).log()
        with torch.no_grad():
            tokens = sample(actor, prompts, noise)
            before = scores(actor(input_ids=tokens).logits, tokens)
            known = scores(reference(input_ids=tokens).logits, tokens)
            points = reward(tokens).view(-1, GROUP)
        gain = (points - points.mean(1, keepdim=True)) / (points.std(1, keepdim=True) + 1e-4)
        drawn = {"tokens": tokens, "before": before, "known": known, "gain": gain.view(-1, 1)}
        for _ in range(UPDATES):
            loss = actor.step(input_ids=tokens, **drawn)
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print("\n".join(f"step {number}: {loss:.4f}" for number, loss in enumerate(train(), 1)))
    dist.destroy_process_group()
