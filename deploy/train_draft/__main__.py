"""One command, four stages: data, train, evaluate, export. Each keeps its result in ``--work`` and is not run twice."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import data, evaluation, training
from .head import DraftHead, HeadShape, export
from .target import load_target, load_tokenizer

STAGES = ("data", "train", "evaluate", "export")
BYTES_LIMIT = 20_000_000
TEXTS = Path(__file__).parents[2] / "loadtest" / "offer" / "texts"


def say(line: str) -> None:
    """Progress, on standard error."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stderr.flush()


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m deploy.train_draft", description=__doc__)
    p.add_argument("--model", type=Path, required=True, help="directory of the target's checkpoint")
    p.add_argument("--work", type=Path, required=True, help="directory for data and checkpoints")
    p.add_argument("--out", type=Path, help="directory for the exported head (default: WORK/head)")
    p.add_argument("--stages", default=",".join(STAGES), help="which to run, in order")
    p.add_argument("--data-s", type=float, default=400.0, help="seconds for writing data")
    p.add_argument("--train-s", type=float, default=900.0, help="seconds of training in this call")
    p.add_argument("--train-until", type=float, default=1.0, help="end of this call on the cosine, up to 1")
    p.add_argument("--rows", type=int, default=2048, help="rows that are written at once")
    p.add_argument("--length", type=int, default=512, help="tokens in a row")
    p.add_argument("--batch-rows", type=int, default=64, help="rows in a training step")
    p.add_argument("--unroll", type=int, default=4, help="drafted tokens in training")
    p.add_argument("--draft-vocab", type=int, default=6144, help="tokens in the head's vocabulary")
    p.add_argument("--mlp", type=int, default=2304, help="width of the head's MLP")
    p.add_argument("--learning-rate", type=float, default=1.5e-3)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--texts", type=Path, default=TEXTS, help="the load lab's texts, held out")
    return p.parse_args(argv)


def read_batches(work: Path) -> tuple[Tensor, Tensor]:
    """All rows written so far: tokens (int32) and who wrote them.

    Raises:
        SystemExit: there are none.
    """
    files = sorted((work / "data").glob("batch-*.pt"))
    if not files:
        raise SystemExit(f"{work / 'data'}: no batch-*.pt: run the stage 'data' first (--stages)")
    batches = [torch.load(f) for f in files]
    return torch.cat([b["tokens"] for b in batches]), torch.cat([b["writer"] for b in batches])


def write_data(options: argparse.Namespace, model: Any, tokenizer: Any) -> None:
    folder = options.work / "data"
    folder.mkdir(parents=True, exist_ok=True)
    held_file = folder / "held-out.pt"
    if not held_file.exists():
        held = data.answer_held_out(model, tokenizer, data.load_lab_prompts(options.texts), options.length)
        torch.save({"kinds": held.kinds, "prompt_tokens": held.prompt_tokens, "tokens": held.tokens}, held_file)
        say(f"data: {len(held.kinds)} held-out answers")
    already = len(list(folder.glob("batch-*.pt")))

    def keep(tokens: Tensor, writer: Tensor, batch: int) -> None:
        part = {"tokens": tokens.to(torch.int32), "writer": writer}
        training.save_checkpoint(folder / f"batch-{already + batch:04d}.pt", part)

    data.write_training_text(
        model,
        tokenizer,
        rows=options.rows,
        length=options.length,
        budget_s=options.data_s,
        seed=options.seed + already,
        keep=keep,
        say=say,
    )


def restore(options: argparse.Namespace, model: Any) -> tuple[DraftHead, Tensor, dict[str, Any]]:
    saved = torch.load(options.work / "head.pt", map_location=model.device)
    shape = HeadShape(**{**saved["shape"], "aux_layers": tuple(saved["shape"]["aux_layers"])})
    head = DraftHead(shape).to(model.device)
    head.load_state_dict(saved["head"])
    return head, saved["draft_ids"], saved


def run_training(options: argparse.Namespace, model: Any) -> None:
    tokens, writer = read_batches(options.work)
    path = options.work / "head.pt"
    began = 0.0
    if path.exists():
        head, draft_ids, saved = restore(options, model)
        optimizer = training.optimizer_for(head, options.learning_rate)
        optimizer.load_state_dict(saved["optimizer"])
        began = saved["place"]
    else:
        shape = training.shape_for(model.config, options.draft_vocab, options.mlp)
        torch.manual_seed(options.seed)
        draft_ids = training.choose_vocabulary(
            tokens, writer, model.config.vocab_size, options.draft_vocab
        ).to(model.device)
        head = training.start(model, shape, draft_ids)
        optimizer = training.optimizer_for(head, options.learning_rate)
    parameters = sum(p.numel() for p in head.parameters())
    if 2 * parameters > BYTES_LIMIT:
        say(f"train: the head is {2 * parameters:,} bytes in bf16, over {BYTES_LIMIT:,} (--mlp, --draft-vocab)")
    say(f"train: {tokens.numel():,} tokens, {parameters:,} parameters, from {began:.2f} of the schedule")
    if began >= options.train_until:
        say(f"train: already at {began:.2f} of the schedule (--train-until {options.train_until}): nothing to do")
        return

    def checkpoint(place: float) -> None:
        names = HeadShape.__dataclass_fields__
        state = {
            "head": head.state_dict(),
            "optimizer": optimizer.state_dict(),
            "draft_ids": draft_ids,
            "shape": {k: getattr(head.shape, k) for k in names},
            "place": place,
            "data_tokens": tokens.numel(),
        }
        training.save_checkpoint(path, state)

    schedule = training.Schedule(
        options.train_s, began, options.train_until, options.batch_rows, options.unroll, options.learning_rate
    )
    checkpoint(training.train(model, head, optimizer, tokens, writer, draft_ids, schedule, say, checkpoint))


def run_evaluation(options: argparse.Namespace, model: Any) -> None:
    head, draft_ids, _ = restore(options, model)
    held = data.HeldOut(**torch.load(options.work / "data" / "held-out.pt"))
    report = evaluation.evaluate(model, head, draft_ids, held)
    (options.work / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    for kind, figures in report.items():
        say(f"evaluate: {kind}: {figures}")


def run_export(options: argparse.Namespace, model: Any) -> None:
    head, draft_ids, saved = restore(options, model)
    out = options.out or options.work / "head"
    size = export(head, draft_ids, json.loads((options.model / "config.json").read_text()), out)
    report = json.loads((options.work / "report.json").read_text())
    (out / "README.md").write_text(model_card(report, saved, size))
    say(f"export: {out}, {size:,} bytes")


def model_card(report: dict[str, Any], saved: dict[str, Any], size_bytes: int) -> str:
    """The card: data, training, figures, limits, licence."""
    rows = [
        f"| {kind} ({r['prompts']} prompts) | "
        + " | ".join(f"{x:.2f}" for x in r["mean_accepted_length"].values())
        + f" | {' '.join(f'{x:.2f}' for x in r['acceptance_by_position'])} |"
        for kind, r in report.items()
    ]
    return "\n".join(
        [
            "# A learned draft (EAGLE-3 head)",
            "",
            f"Data: {saved['data_tokens']:,} tokens that the target wrote itself, prompts included.",
            f"Training: `python -m deploy.train_draft`, {saved['place']:.2f} of its schedule.",
            f"Shape: `{saved['shape']}`; {size_bytes:,} bytes.",
            "",
            "Mean accepted length (1 + accepted / steps), greedy, the first 48 tokens of answers to held-out prompts,",
            "computed in plain torch; by position with five drafts:",
            "",
            "| text | k=1 | 2 | 3 | 4 | 5 | by position |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            "Limits: only for the target whose states it reads, and its acceptance falls on text unlike its data.",
            "Licence: Apache-2.0; the target's licence applies as well, for the head begins as a part of it.",
            "",
        ]
    )


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    stages = options.stages.split(",")
    if unknown := [s for s in stages if s not in STAGES]:
        raise SystemExit(f"--stages {unknown}: of {', '.join(STAGES)}")
    options.work.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    say(f"target {options.model}, device {device}")
    model = load_target(options.model, device)
    for stage in stages:
        if stage == "data":
            write_data(options, model, load_tokenizer(options.model))
        elif stage == "train":
            run_training(options, model)
        elif stage == "evaluate":
            run_evaluation(options, model)
        else:
            run_export(options, model)


if __name__ == "__main__":
    main()
