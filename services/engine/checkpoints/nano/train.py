"""Train the nano model for a given time on one GPU (or, for a smoke run, on the CPU).

`python -m services.engine.checkpoints.nano.train --seconds 480 --output DIR`
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from services.common.cli.base import say
from services.engine.checkpoints.nano.config import MODEL_DIR, NanoConfig
from services.engine.checkpoints.nano.data import (
    DOCUMENT,
    IDS,
    POS,
    START,
    TARGET,
    Rows,
    RowServer,
    scoring_rows,
)
from services.engine.checkpoints.nano.functional import linear
from services.engine.checkpoints.nano.model import Aux, NanoModel, Ops, Step

SCORED = (
    ("arithmetic", True),
    ("tools", True),
    ("passages", True),
    ("passages_long", True),
    ("arithmetic_long", True),
    ("talk", True),
    ("arithmetic", False),
    ("tools", False),
    ("passages", False),
)
_PARTS = 2  # weight files, so that each stays small


@dataclass(frozen=True, slots=True)
class Recipe:
    """Every number of the training run."""

    seconds: float = 480.0
    rows: int = 64
    length: int = 1024
    seed: int = 20260
    peak_lr: float = 3e-3
    final_lr: float = 3e-5
    warmup_steps: int = 150
    weight_decay: float = 0.05
    clip: float = 1.0
    dense_share: float = 0.15  # share of the run before blocks are selected
    prompt_weight: float = 0.1  # loss weight of tokens that the model only reads
    balance_weight: float = 0.01
    divergence_weight: float = 0.5
    margin_weight: float = 0.1
    draft_depth: int = 2
    draft_weight: float = 0.5
    score_every: float = 60.0
    score_count: int = 256
    workers: int = 14


def head_loss(hidden: Tensor, head: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted mean cross entropy of the labels."""
    logits = linear(hidden, head).float()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (loss * weight.flatten()).sum() / weight.sum().clamp_min(1.0)


class Trainer:
    """Owns model, optimiser and compiled functions of one run."""

    def __init__(self, recipe: Recipe, device: torch.device, compiled: bool) -> None:
        self.recipe, self.device, self.cfg = recipe, device, NanoConfig()
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(recipe.seed)
        torch.set_float32_matmul_precision("high")
        self.model = NanoModel(self.cfg).to(device)
        self.ops, self.head_loss = Ops(), head_loss
        if compiled:
            # The delta rule stays eager: its loop over chunks is slow to compile, quick to run.
            names = [item.name for item in fields(Ops) if item.name != "delta_rule"]
            torch._dynamo.config.recompile_limit = 64
            for name in names:
                setattr(self.ops, name, torch.compile(getattr(self.ops, name), dynamic=False))
            self.head_loss = torch.compile(head_loss, dynamic=False)
        plain = [p for n, p in self.model.named_parameters() if p.dim() < 2 or "embed" in n]
        decayed = [p for n, p in self.model.named_parameters() if p.dim() >= 2 and "embed" not in n]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": recipe.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=0.0,
            betas=(0.9, 0.98),
            eps=1e-9,
            fused=device.type == "cuda",
        )

    def rate(self, step: int, progress: float) -> float:
        """Return the learning rate: linear warm-up, then a cosine over the run's time."""
        recipe = self.recipe
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        rate = recipe.final_lr + (recipe.peak_lr - recipe.final_lr) * cosine
        return rate * min(1.0, (step + 1) / recipe.warmup_steps)

    def batch(self, rows: Rows, select: bool) -> tuple[Step, Tensor]:
        """Return the model step and the target plane of a batch of rows."""
        planes = torch.from_numpy(rows).to(self.device, non_blocking=True).long()
        step = self.model.step(
            planes[:, IDS], planes[:, POS], planes[:, START], select, self.dtype, self.ops
        )
        return step, planes[:, TARGET]

    def losses(self, rows: Rows, select: bool) -> dict[str, Tensor]:
        """Return the losses of a batch."""
        recipe, model = self.recipe, self.model
        step, target = self.batch(rows, select)
        aux, draft_aux = model.new_aux(), model.new_aux()
        streams, hidden = model.trunk(step, aux)
        out: dict[str, Tensor] = {}
        for ahead in range(1, recipe.draft_depth + 2):
            inside = step.pos.roll(-ahead, 1) >= ahead
            inside[:, -ahead:] = False
            weight = torch.where(target.roll(-ahead, 1) > 0, 1.0, recipe.prompt_weight) * inside
            labels = step.ids.roll(-ahead, 1)
            if ahead == 1:
                out["trunk"] = self.head_loss(hidden, model.lm_head.weight, labels, weight)
                drafts = model.drafts(streams, recipe.draft_depth, step, draft_aux)
            else:
                draft = self._draft_loss(drafts[ahead - 2], ahead - 2, step, target)
                out[f"draft{ahead - 1}"] = draft
        self._add_aux(out, aux, draft_aux)
        return out

    def _draft_loss(self, hidden: Tensor, depth: int, step: Step, target: Tensor) -> Tensor:
        """Loss of a draft that guesses token i + 2 after `depth` earlier drafts."""
        inside = (step.pos.roll(-2, 1) >= 2 + depth) & (step.pos >= depth)
        inside[:, -2:] = False
        weight = torch.where(target.roll(-2, 1) > 0, 1.0, self.recipe.prompt_weight) * inside
        head = self.model.lm_head.weight.detach()
        return self.head_loss(hidden, head, step.ids.roll(-2, 1), weight)

    def _add_aux(self, out: dict[str, Tensor], aux: Aux, draft: Aux) -> None:
        out["balance"] = aux.balance + draft.balance
        out["divergence"] = aux.divergence + draft.divergence
        out["margin"] = aux.margin + draft.margin

    def train_step(self, rows: Rows, step: int, progress: float) -> dict[str, Tensor]:
        """Update the weights once; returns detached losses."""
        recipe = self.recipe
        out = self.losses(rows, select=progress >= recipe.dense_share)
        total = out["trunk"] + recipe.balance_weight * out["balance"]
        total = total + recipe.divergence_weight * out["divergence"]
        total = total + recipe.margin_weight * out["margin"]
        drafts = [value for name, value in out.items() if name.startswith("draft")]
        for value in drafts:
            total = total + recipe.draft_weight * value
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step, progress)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {name: value.detach() for name, value in out.items()} | {"norm": norm}

    @torch.no_grad()
    def score(self, rows: Rows, batch: int) -> dict[str, float]:
        """Return the share of documents whose whole answer is the greedy choice, and of drafts."""
        documents = right_documents = 0
        guessed = [0, 0]
        for begin in range(0, len(rows), batch):
            part = rows[begin : begin + batch]
            count = len(part)
            if count < batch:
                part = np.concatenate([part, np.repeat(part[-1:], batch - count, axis=0)])
            step, target = self.batch(part, select=True)
            streams, hidden = self.model.trunk(step, self.model.new_aux())
            choice = linear(hidden, self.model.lm_head.weight).argmax(-1)
            wrong = (choice.roll(1, 1) != step.ids) & (target > 0)
            document = torch.from_numpy(part[:, DOCUMENT]).to(self.device).long()
            grid = torch.zeros(batch, 1024, device=self.device)
            has = grid.scatter_add(1, document, (target > 0).float())[:count] > 0
            bad = grid.scatter_add(1, document, wrong.float())[:count] > 0
            documents += int(has.sum())
            right_documents += int((has & ~bad).sum())
            draft = self.model.drafts(streams, 1, step, self.model.new_aux())[0]
            guess = linear(draft, self.model.lm_head.weight).argmax(-1)
            at = (target > 0) & (step.pos >= 2)
            guessed[0] += int(((guess.roll(2, 1) == step.ids) & at)[:count].sum())
            guessed[1] += int(at[:count].sum())
        return {
            "exact": right_documents / max(1, documents),
            "draft": guessed[0] / max(1, guessed[1]),
            "count": documents,
        }

    def save(self, folder: Path) -> None:
        """Write the fp32 weights in a few files."""
        state = {n: v.detach().cpu().contiguous() for n, v in self.model.state_dict().items()}
        names = sorted(state)
        for part in range(_PARTS):
            chosen = {name: state[name] for name in names[part::_PARTS]}
            save_file(chosen, str(folder / f"weights-{part}.safetensors"))


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights that `Trainer.save` wrote."""
    out: dict[str, Tensor] = {}
    for part in range(_PARTS):
        out |= load_file(str(folder / f"weights-{part}.safetensors"))
    return out


def _score_all(trainer: Trainer, sets: dict[str, Rows], batch: int) -> dict[str, float]:
    report: dict[str, float] = {}
    draft = []
    for name, rows in sets.items():
        result = trainer.score(rows, batch)
        report[name] = round(result["exact"], 4)
        draft.append(result["draft"])
    report["draft"] = round(sum(draft) / len(draft), 4)
    return report


def _say(**values: object) -> None:
    say(json.dumps(values))


def run(recipe: Recipe, output: Path, first: Path | None, compiled: bool) -> None:
    """Train until the time is over, scoring and saving on the way and at the end."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(recipe, device, compiled)
    if first is not None:
        trainer.model.load_state_dict(load_weights(first))
    path, fill = MODEL_DIR / "tokenizer.json", trainer.cfg.endoftext_id
    server = RowServer(path, recipe.seed, recipe.length, fill, recipe.rows, recipe.workers)
    tokenizer = Tokenizer.from_file(str(path))
    sets = {
        task if thinking else f"{task}_direct": scoring_rows(
            tokenizer, task, recipe.score_count, recipe.length, fill, thinking
        )
        for task, thinking in SCORED
    }
    began = time.monotonic()
    for select in (False, True):  # compile both forms of attention before the clock runs
        torch.stack(list(trainer.losses(server.take(), select).values())).sum().backward()
        trainer.optimizer.zero_grad(set_to_none=True)
    trainer.score(sets["talk"], recipe.rows)
    _say(event="ready", setup_seconds=round(time.monotonic() - began, 1), device=str(device))
    begin = last_score = time.monotonic()
    step, progress = 0, 0.0
    sums: dict[str, Tensor | float] = {}
    while progress < 1.0:
        now = time.monotonic()
        progress = (now - begin) / recipe.seconds
        report = trainer.train_step(server.take(), step, progress)
        step += 1
        sums = {name: sums.get(name, 0.0) + value for name, value in report.items()}
        if step % 50 == 0 or step < 4:
            count = 50 if step % 50 == 0 else 1
            losses = {name: round(float(value) / count, 4) for name, value in sums.items()}
            sums = {}
            _say(
                step=step, seconds=round(time.monotonic() - begin, 1),
                rows_ready=server.waiting(), **losses,
            )  # fmt: skip
        if now - last_score > recipe.score_every:
            last_score = now
            _say(event="score", step=step, **_score_all(trainer, sets, recipe.rows))
            trainer.save(output)
    scores = _score_all(trainer, sets, recipe.rows)
    trainer.save(output)
    server.close()
    _say(event="end", step=step, **scores)
    summary = {
        "recipe": asdict(recipe), "steps": step,
        "tokens": step * recipe.rows * recipe.length, "teacher_forced": scores,
    }  # fmt: skip
    if device.type == "cuda":
        summary["device"] = torch.cuda.get_device_name()
        summary["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    (output / "train.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    _say(**summary)


def main() -> None:
    """Command line; every field of `Recipe` is a flag."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--init", type=Path, help="folder with weights to start from")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    for item in fields(Recipe):
        flag = "--" + item.name.replace("_", "-")
        parser.add_argument(flag, type=type(item.default), default=item.default)
    args = parser.parse_args()
    recipe = Recipe(**{item.name: getattr(args, item.name) for item in fields(Recipe)})
    args.output.mkdir(parents=True, exist_ok=True)
    run(recipe, args.output, args.init, compiled=not args.eager)


if __name__ == "__main__":
    main()
