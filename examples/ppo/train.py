"""Trains a policy by PPO: torchrun --nproc-per-node 2 examples/ppo/train.py

The actor continues prompts, a reward model scores the texts, and a critic learns to foresee the
score at every word. The actor learns to prefer words that turn out better than foreseen, and pays
for straying from the reference.
"""

import copy
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import autopar

WORDS, PROMPT, LENGTH, TEXTS, STEPS, UPDATES = 32, 4, 12, 16, 12, 4
DECAY, STRAYING = 0.95, 0.02


class Reward(nn.Module):
    """Scores a text: the mean of what its words and their neighbours are worth."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.head = nn.Sequential(nn.Conv1d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 1, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.words(tokens).transpose(1, 2)).mean((1, 2))


class Critic(nn.Module):
    """Foresees the score of a text at each of its words."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(32, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens).last_hidden_state)[:, PROMPT - 1 : -1, 0]


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


def loss_of(output: object, tokens: Tensor, before: Tensor, gain: Tensor) -> Tensor:
    """The clipped gain of PPO."""
    ratio = (scores(output.logits, tokens) - before).exp()
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


def error_of(values: Tensor, returns: Tensor) -> Tensor:
    return (values - returns).square().mean()


def sample(actor: nn.Module, prompts: Tensor, noise: Tensor) -> Tensor:
    """Continues prompts; adding Gumbel noise to logits draws words by their probabilities."""
    tokens = F.pad(prompts, (0, LENGTH - PROMPT))
    for place in range(PROMPT, LENGTH):
        logits = actor(input_ids=tokens).logits[:, place - 1]
        tokens[:, place] = (logits + noise[:, place - PROMPT]).argmax(-1)
    return tokens


def gains(values: Tensor, rewards: Tensor) -> Tensor:
    """Returns how much better every word was than foreseen, by generalised advantages."""
    better = rewards + F.pad(values[:, 1:], (0, 1)) - values
    words = torch.arange(better.shape[1])
    later = words[:, None] - words
    return better @ (DECAY ** later.clamp(min=0)).tril()


def train() -> list[float]:
    torch.manual_seed(0)
    adam = partial(torch.optim.AdamW, lr=1e-2)
    actor, reward = llama(), Reward().requires_grad_(False).eval()
    reference, critic = copy.deepcopy(actor).requires_grad_(False).eval(), Critic(llama().model)
    texts, figures = torch.zeros(TEXTS, LENGTH).long(), torch.zeros(TEXTS, LENGTH - PROMPT)
    batch = {"input_ids": texts, "tokens": texts, "before": figures, "gain": figures}
    seen = {"tokens": texts, "returns": figures}
    models = {
        "actor": {"model": actor, "optimizer": adam, "loss_fn": loss_of, "example_inputs": batch},
        "critic": {"model": critic, "optimizer": adam, "loss_fn": error_of, "example_inputs": seen},
        "reference": {"model": reference, "example_inputs": {"input_ids": texts}},
        "reward": {"model": reward, "example_inputs": texts},
    }
    actor, critic, reference, reward = autopar.compile_together(models, "cpu: data=2").values()
    draw, results = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        prompts = torch.randint(WORDS, (TEXTS, PROMPT), generator=draw)
        noise = -(-torch.rand(TEXTS, LENGTH - PROMPT, WORDS, generator=draw).log()).log()
        with torch.no_grad():
            tokens = sample(actor, prompts, noise)
            before = scores(actor(input_ids=tokens).logits, tokens)
            known = scores(reference(input_ids=tokens).logits, tokens)
            values, points = critic(tokens), reward(tokens)
        rewards = STRAYING * (known - before)
        rewards[:, -1] += points
        gain = gains(values, rewards)
        drawn = {"tokens": tokens, "before": before, "gain": gain}
        results.append(points.mean().item())
        for _ in range(UPDATES):
            loss = actor.step(input_ids=tokens, **drawn)
            error = critic.step(tokens, returns=values + gain)
            results += [loss.item(), error.item()]
    return results


def lines(results: list[float]) -> str:
    turns = torch.tensor(results).view(STEPS, -1)
    return "\n".join(
        f"turn {number}: score {turn[0]:.4f}, loss {turn[1]:.4f}, critic's error {turn[2]:.4f}"
        for number, turn in enumerate(turns, 1)
    )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(lines(train()))
    dist.destroy_process_group()
