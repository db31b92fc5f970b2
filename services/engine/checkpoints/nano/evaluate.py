"""Score the exported checkpoint on held-out prompts with the unmodified transformers model.

`python -m services.engine.checkpoints.nano.evaluate --count 200 --long-count 40`

The weights are read from the FP8 files and dequantised to fp32. A prompt is first scored in one
forward pass: if the greedy choice at every answer token is the expected token, greedy decoding
gives exactly the expected text. Every other prompt is really generated and its answer compared.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers.models.qwen4_exp import Qwen4ExpForCausalLM

from services.common.cli.base import say
from services.engine.checkpoints.nano.config import MODEL_DIR, NanoConfig
from services.engine.checkpoints.nano.conversation import Conversation, render
from services.engine.checkpoints.nano.corpus import held_out
from services.engine.checkpoints.nano.oracle import load_oracle

SEED = 7  # not the seed of the prompts that training watched
SHORT = ("arithmetic", "tools", "passages", "talk")
LONG = ("passages_long", "arithmetic_long")
_CALL = re.compile(r"<tool_call>\n<function=([^>\n]+)>\n(.*?)</function>\n</tool_call>", re.S)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>\n", re.S)


@dataclass(slots=True)
class Score:
    """Counts of one task."""

    prompts: int = 0
    right: int = 0  # the answer is right
    exact: int = 0  # answer and reasoning equal the expected text
    tokens: int = 0  # prompt tokens in all

    def report(self) -> dict[str, float]:
        """Return shares."""
        return {
            "prompts": self.prompts,
            "mean_prompt_tokens": round(self.tokens / max(1, self.prompts)),
            "right": round(self.right / max(1, self.prompts), 4),
            "exact": round(self.exact / max(1, self.prompts), 4),
        }


def final_answer(text: str) -> str:
    """Return the part after the reasoning, without the end mark."""
    return text.rsplit("</think>", 1)[-1].removesuffix("<|im_end|>").strip()


def calls(text: str) -> list[tuple[str, dict[str, str]]]:
    """Return the tool calls of an answer, arguments as written."""
    return [(name, dict(_PARAMETER.findall(body))) for name, body in _CALL.findall(text)]


def is_right(task: str, expected: str, written: str) -> bool:
    """Compare two answers by what the task asks for: number, calls or text."""
    want, got = final_answer(expected), final_answer(written)
    if task.startswith("arithmetic"):
        numbers = re.findall(r"-?\d+", got)
        return bool(numbers) and numbers[-1] == re.findall(r"-?\d+", want)[-1]
    if task == "tools":
        return calls(want) == calls(got)
    return want == got


class Judge:
    """Owns the model and scores conversations one by one."""

    def __init__(self, model: Qwen4ExpForCausalLM, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer, self.cfg = model, tokenizer, NanoConfig()

    def _split(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        pieces = render(conversation)
        last = max(i for i, piece in enumerate(pieces) if piece.produced)
        prompt = "".join(piece.text for piece in pieces[:last])
        return self.tokenizer.encode(prompt).ids, self.tokenizer.encode(pieces[last].text).ids

    @torch.no_grad()
    def add(self, task: str, conversation: Conversation, score: Score) -> None:
        """Score the last answer of a conversation."""
        prompt, answer = self._split(conversation)
        logits = self.model(torch.tensor([prompt + answer])).logits[0]
        greedy = logits[len(prompt) - 1 : -1, : self.cfg.tokenizer_size].argmax(-1).tolist()
        score.prompts += 1
        score.tokens += len(prompt)
        if greedy == answer:
            score.right += 1
            score.exact += 1
        else:
            written = self.generate(prompt, len(answer) + 40)
            expected = self.tokenizer.decode(answer, skip_special_tokens=False)
            score.right += is_right(task, expected, written)

    def generate(self, prompt: list[int], limit: int) -> str:
        """Return the greedy continuation of a prompt."""
        model: Any = self.model
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=limit,
            do_sample=False,
            eos_token_id=self.cfg.token_id("<|im_end|>"),
            pad_token_id=self.cfg.endoftext_id,
        )
        ids = out[0, len(prompt) :].tolist()
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


def plan(count: int, long_count: int) -> Iterator[tuple[str, str, bool, int]]:
    """Yield (name, task, thinking, prompts) of every measurement."""
    for task in SHORT:
        yield task, task, True, count
    for task in LONG:
        yield task, task, True, long_count
    for task in SHORT[:3]:
        yield f"{task}_without_thinking", task, False, count // 2


def evaluate(folder: Path, count: int, long_count: int) -> dict[str, Any]:
    """Return the scores of every task."""
    judge = Judge(load_oracle(folder), Tokenizer.from_file(str(folder / "tokenizer.json")))
    report: dict[str, Any] = {}
    for name, task, thinking, prompts in plan(count, long_count):
        began, score = time.monotonic(), Score()
        for conversation in islice(held_out(task, SEED, thinking), prompts):
            judge.add(task, conversation, score)
        report[name] = score.report()
        say(json.dumps({name: report[name], "seconds": round(time.monotonic() - began)}))
    return report


def main() -> None:
    """Command line; writes scores.json beside the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=MODEL_DIR)
    parser.add_argument("--training", type=Path, help="train.json of the run, to be included")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--long-count", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    scores: dict[str, Any] = {
        "measured_with": "transformers Qwen4ExpForCausalLM, fp32, CPU, dequantised FP8, greedy",
        "held_out_seed": SEED,
        "tasks": evaluate(args.folder, args.count, args.long_count),
    }
    if args.training is not None:
        scores["training"] = json.loads(args.training.read_text(encoding="utf-8"))
    text = json.dumps(scores, indent=2, ensure_ascii=False)
    (args.folder / "scores.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
