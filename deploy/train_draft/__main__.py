"""One command, four stages: data, train, evaluate, export. Each keeps its result in ``--work``.

A stage that is called again goes on: data adds batches, training continues its checkpoint, the other two are
made anew. Each ends within its time limit with what it has.
"""

import argparse
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import data, evaluation, training
from .card import model_card
from .head import DraftHead, export, load, shape_fields, shape_from
from .target import ChatFormat, Target, chat_format, load_target, load_tokenizer

STAGES = ("data", "train", "evaluate", "export")
BYTES_LIMIT = 20_000_000
TEXTS = Path(__file__).parents[2] / "loadtest" / "offer" / "texts"
UNSEEN_ROWS = 512  # of each pool; at most a tenth of it


def say(line: str) -> None:
    """Progress, on standard error."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stderr.flush()


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m deploy.train_draft", description=__doc__)
    p.add_argument("--model", type=Path, required=True, help="directory of the target's checkpoint")
    p.add_argument("--work", type=Path, required=True, help="directory for data and checkpoints")
    p.add_argument("--out", type=Path, help="directory for the exported head (default: WORK/NAME)")
    p.add_argument("--name", default="head", help="of the checkpoint, to train several on the same data")
    p.add_argument("--head", type=Path, help="evaluate this exported head instead of WORK/NAME.pt")
    p.add_argument("--stages", default=",".join(STAGES), help="which to run, in order")
    p.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    p.add_argument("--data-s", type=float, default=300.0, help="time limit of writing data in this call")
    p.add_argument("--train-s", type=float, default=900.0, help="time limit of training in this call")
    p.add_argument("--max-steps", type=int, help="of training in this call, to compare settings")
    p.add_argument("--train-until", type=float, default=1.0, help="end of this call on the cosine, up to 1")
    p.add_argument("--short-share", type=float, default=0.4, help="of the time for data, for short rows")
    p.add_argument("--rows", type=int, default=4096, help="long rows that are written at once")
    p.add_argument("--length", type=int, default=512, help="tokens in a long row")
    p.add_argument(
        "--short-length", type=int, default=128, help="tokens in a short row; 4 are written for each long"
    )
    p.add_argument("--step-tokens", type=int, default=32_768, help="tokens in a training step")
    p.add_argument("--unroll", type=int, default=4, help="drafted tokens in training")
    p.add_argument("--draft-vocab", type=int, default=6144, help="tokens in the head's vocabulary")
    p.add_argument("--mlp", type=int, default=2304, help="width of the head's MLP")
    p.add_argument("--layers", type=int, default=1, help="layers of the head")
    p.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    p.add_argument("--learning-rate", type=float, default=1.5e-3)
    p.add_argument("--report-every", type=int, default=200, help="steps between two lines of progress")
    p.add_argument("--no-cuda-graphs", action="store_true", help="write data without them, more slowly")
    p.add_argument("--no-compile", action="store_true", help="train without torch.compile, far more slowly")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--texts", type=Path, default=TEXTS, help="the load lab's texts, held out")
    return p.parse_args(argv)


def read_pools(work: Path) -> dict[str, training.Rows]:
    """All rows written so far, by the pool's name.

    Raises:
        SystemExit: there are none.
    """
    found: dict[str, training.Rows] = {}
    for name in ("long", "short"):
        batches = [torch.load(f) for f in sorted((work / "data").glob(f"{name}-*.pt"))]
        if batches:
            tokens, writer = (torch.cat([b[k] for b in batches]) for k in ("tokens", "writer"))
            found[name] = training.Rows(tokens, writer)
    if not found:
        raise SystemExit(
            f"{work / 'data'}: no long-*.pt or short-*.pt: run the stage 'data' first (--stages)"
        )
    return found


def split_pools(pools: dict[str, training.Rows]) -> tuple[dict[str, training.Rows], dict[str, training.Rows]]:
    """Rows to train on, and the first few of each pool, to measure on."""
    seen, unseen = {}, {}
    for name, rows in pools.items():
        n = min(UNSEEN_ROWS, -(-len(rows.tokens) // 10))
        unseen[name] = training.Rows(rows.tokens[:n], rows.writer[:n])
        seen[name] = training.Rows(rows.tokens[n:], rows.writer[n:])
    return seen, unseen


def held_out(options: argparse.Namespace, target: Target, tokenizer: Any, form: ChatFormat) -> data.HeldOut:
    """The target's answers to the held-out prompts, written when first asked for."""
    path = options.work / "data" / "held-out.pt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        more = evaluation.ANSWER_TOKENS + evaluation.MAX_DRAFTS + 3
        held = data.answer_held_out(target, tokenizer, form, data.load_lab_prompts(options.texts), more)
        kept = {"kinds": held.kinds, "prompt_tokens": held.prompt_tokens, "tokens": held.tokens}
        training.save_atomically(path, kept)
        say(f"data: {len(held.kinds)} held-out answers")
    return data.HeldOut(**torch.load(path))


def write_data(options: argparse.Namespace, target: Target) -> None:
    began = time.monotonic()
    tokenizer = load_tokenizer(options.model)
    form = chat_format(tokenizer)
    held_out(options, target, tokenizer, form)
    folder = options.work / "data"
    own: list[str] = []
    pools = [data.Pool("long", options.rows, options.length, 0.65, 0, data.LONG)]
    if options.short_share:
        short = data.Pool(
            "short", 4 * options.rows, options.short_length, 0.8, options.short_length // 4, data.SHORT
        )
        pools.append(short)
    for pool, share in zip(pools, (1 - options.short_share, 1.0), strict=False):
        already = len(list(folder.glob(f"{pool.name}-*.pt")))

        def keep(
            tokens: Tensor, writer: Tensor, batch: int, name: str = pool.name, first: int = already
        ) -> None:
            part = {"tokens": tokens, "writer": writer}
            training.save_atomically(folder / f"{name}-{first + batch:04d}.pt", part)

        own = data.write_pool(
            target,
            tokenizer,
            form,
            pool,
            own=own,
            until=began + share * options.data_s,
            seed=options.seed + 1000 * already + len(pool.name),
            cuda_graphs=target.device.type == "cuda" and not options.no_cuda_graphs,
            keep=keep,
            say=say,
        )
        if target.device.type == "cuda":
            say(f"data: {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB of GPU memory at most")
            torch.cuda.empty_cache()
    say(f"data: {time.monotonic() - began:.0f} s")


def checkpoint_of(options: argparse.Namespace) -> Path:
    return Path(options.work / f"{options.name}.pt")


def restore(options: argparse.Namespace, target: Target) -> tuple[training.Trained, dict[str, Any]]:
    """The checkpoint, its optimizers empty, and all that was kept with it."""
    saved = torch.load(checkpoint_of(options), map_location=target.device)
    head = DraftHead(shape_from(saved["shape"])).to(target.device)
    head.load_state_dict(saved["head"])
    progress = {k: saved[k] for k in ("place", "steps", "tokens_seen")}
    return training.Trained(head, saved["average"], [], saved["draft_ids"], **progress), saved


def averaged(trained: training.Trained) -> DraftHead:
    """A head with the moving average of the weights."""
    head = DraftHead(trained.head.shape).to(trained.draft_ids.device)
    head.load_state_dict(trained.average)
    return head


def run_training(options: argparse.Namespace, target: Target) -> None:
    began = time.monotonic()
    pools = read_pools(options.work)
    seen, unseen = split_pools(pools)
    data_tokens = sum(p.tokens.numel() for p in pools.values())
    rate, kind = options.learning_rate, options.optimizer
    if checkpoint_of(options).exists():
        trained, saved = restore(options, target)
        about, kind = saved["about"], saved["about"]["optimizer"]
        trained.optimizers = training.optimizers_for(trained.head, rate, kind)
        peaks = [[g["peak"] for g in o.param_groups] for o in trained.optimizers]
        for optimizer, state in zip(trained.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
    else:
        torch.manual_seed(options.seed)
        draft_ids, share = training.choose_vocabulary(
            list(seen.values()), target.vocabulary, options.draft_vocab
        )
        draft_ids = draft_ids.to(target.device)
        shape = training.shape_for(target, options.draft_vocab, options.mlp, options.layers)
        head = training.start(target, shape, draft_ids)
        average = {k: v.detach().clone() for k, v in head.state_dict().items()}
        trained = training.Trained(head, average, training.optimizers_for(head, rate, kind), draft_ids)
        peaks = [[g["peak"] for g in o.param_groups] for o in trained.optimizers]
        about = {"optimizer": kind, "learning_rate": rate, "vocabulary_share": share, "train_s": 0.0}
    about = {**about, "data_tokens": data_tokens, "unroll": options.unroll, "device": device_name(target)}
    size = 2 * sum(p.numel() for p in trained.head.parameters()) + 8 * len(trained.draft_ids)
    if size > BYTES_LIMIT:
        raise SystemExit(
            f"a head of {size:,} bytes in bf16, over {BYTES_LIMIT:,}: lower --mlp or --draft-vocab"
        )
    say(
        f"train: {options.name}: {data_tokens:,} tokens of data, {size:,} bytes in bf16, vocabulary holds "
        f"{about['vocabulary_share']:.4f} of answers, {kind}, from {trained.place:.3f} to {options.train_until}"
    )
    if trained.place >= options.train_until:
        say("train: already there (--train-until): nothing to do")
        return

    def checkpoint(**more: Any) -> None:
        state = {
            "head": trained.head.state_dict(),
            "average": trained.average,
            "optimizers": [o.state_dict() for o in trained.optimizers],
            "draft_ids": trained.draft_ids,
            "shape": shape_fields(trained.head.shape),
            "place": trained.place,
            "steps": trained.steps,
            "tokens_seen": trained.tokens_seen,
            "about": {**about, "train_s": about["train_s"] + time.monotonic() - began, **more},
        }
        training.save_atomically(checkpoint_of(options), state)

    compiled = target.device.type == "cuda" and not options.no_compile
    end = chat_format(load_tokenizer(options.model)).end
    teacher = training.Teacher(target, trained.draft_ids, end, options.unroll, compiled=compiled)
    if compiled:
        trained.head.compile_parts()
    schedule = training.Schedule(
        options.train_s - (time.monotonic() - began),
        trained.place,
        options.train_until,
        options.step_tokens,
        options.unroll,
        rate,
        options.report_every,
        options.max_steps,
    )
    training.train(trained, teacher, list(seen.values()), schedule, say, checkpoint, peaks)
    checkpoint()
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with eager:
        head = averaged(trained)
        lengths = {
            name: round(
                teacher.expected_length(head, rows, max(1, options.step_tokens // rows.tokens.shape[1])), 4
            )
            for name, rows in unseen.items()
        }
    checkpoint(unseen=lengths)
    (options.work / f"{options.name}.json").write_text(json.dumps(lengths) + "\n")
    say(f"train: {options.name}: mean length at k=3 over every place of unseen rows: {lengths}")


def device_name(target: Target) -> str:
    return torch.cuda.get_device_name() if target.device.type == "cuda" else "CPU"


def run_evaluation(options: argparse.Namespace, target: Target) -> None:
    tokenizer = load_tokenizer(options.model)
    held = held_out(options, target, tokenizer, chat_format(tokenizer))
    if options.head:
        head, draft_ids = load(options.head)
        head, draft_ids = head.to(target.device), draft_ids.to(target.device)
    else:
        trained, _ = restore(options, target)
        head, draft_ids = averaged(trained), trained.draft_ids
    report = evaluation.evaluate(target, head, draft_ids, held)
    (options.work / f"{options.name}-report.json").write_text(json.dumps(report, indent=2) + "\n")
    for kind, figures in report.items():
        say(f"evaluate: {kind}: {figures}")


def run_export(options: argparse.Namespace, target: Target) -> None:
    trained, saved = restore(options, target)
    out = options.out or options.work / options.name
    target_config = json.loads((options.model / "config.json").read_text())
    size = export(averaged(trained), trained.draft_ids, target_config, out)
    report = json.loads((options.work / f"{options.name}-report.json").read_text())
    progress = {k: saved[k] for k in ("shape", "place", "steps", "tokens_seen")}
    facts = {"size_bytes": size, **progress, **saved["about"], "held_out": report}
    (out / "figures.json").write_text(json.dumps(facts, indent=2) + "\n")
    (out / "README.md").write_text(model_card(facts))
    say(f"export: {out}, {size:,} bytes")


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    stages = options.stages.split(",")
    if unknown := [s for s in stages if s not in STAGES]:
        raise SystemExit(f"--stages {unknown}: of {', '.join(STAGES)}")
    options.work.mkdir(parents=True, exist_ok=True)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(options.model, device)
    say(f"target {options.model}, {device_name(target)}, torch {torch.__version__}")
    for stage in stages:
        {"data": write_data, "train": run_training, "evaluate": run_evaluation, "export": run_export}[stage](
            options, target
        )


if __name__ == "__main__":
    main()
