"""Train a small character-level GPT on several workers that average parameters.

    python examples/shakespeare.py --workers 4        starts torchrun itself
    torchrun --standalone --nproc-per-node 4 examples/shakespeare.py
                                                      the same, by hand
    python examples/shakespeare.py                    one worker

Every worker keeps a full replica and draws its own batches. There is no all-reduce of gradients and, with
``DecentralizedDataParallel``, no ``optimizer.step()``: ``loss.backward()`` mixes the parameters with what arrived
from the other workers and takes the local optimizer step. ``--baseline ddp`` runs the same model, data and
learning rates under ``torch.nn.parallel.DistributedDataParallel`` instead.

Ctrl+C saves the run and ends it, a second Ctrl+C ends it at once; ``--resume`` goes on from there, bit for bit.

The text is the `shakespeare` package (42 works, three of them held out whole for validation) or ``--data FILE``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from corpus import Corpus, InputError, read_corpus
from decent_dp.checkpoint import StopSignal, checkpoints, load, save
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import DecentDPError, TopologyError
from decent_dp.optim import lr_scheduler_fn_cosine_with_warmup, optim_fn_adamw
from decent_dp.topology import Layout, build
from decent_dp.utils import initialize_dist
from report import Curves, Screen, draw

NUM_VALIDATION_WINDOWS = 256


# ------------------------------------------------------------------------------------------------ model


class Block(nn.Module):
    """Attention over the characters before, then a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only transformer over characters; `forward` returns the mean loss in nats per character."""

    def __init__(self, num_characters: int, context: int, width: int, num_layers: int, num_heads: int):
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(num_characters, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_characters, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * num_layers) ** 0.5 if residual else 0.02)

    def logits(self, x: Tensor) -> Tensor:
        """Scores of the next character at every position: (batch, length) to (batch, length, characters)."""
        hidden = self.characters(x) + self.positions.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(hidden)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x).flatten(0, 1), y.flatten())

    @torch.no_grad()
    def sample(self, start: Tensor, num_characters: int, generator: torch.Generator) -> Tensor:
        """Continue `start` by `num_characters`, each drawn at temperature 0.8."""
        text = start
        for _ in range(num_characters):
            scores = self.logits(text[None, -self.context :])[0, -1]
            drawn = torch.multinomial((scores / 0.8).softmax(0), 1, generator=generator)
            text = torch.cat([text, drawn])
        return text


@torch.no_grad()
def validation_loss(model: nn.Module, corpus: Corpus, context: int, num_windows: int) -> float:
    """Mean loss over the held-out text, nats per character."""
    model.eval()
    losses = [model(x, y) for x, y in corpus.validation_batches(context, num_windows)]
    model.train()
    return torch.stack(losses).mean().item()


# --------------------------------------------------------------------------------------------- training


class DDPBaseline(nn.parallel.DistributedDataParallel):
    """torch DDP with the two things the loop below asks of a decentralized model."""

    def consensus_distance(self) -> float:
        """Zero: under DDP all replicas are equal."""
        return 0.0

    def consensus(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to do: every replica is the average."""
        return contextlib.nullcontext()


def mean_over_workers(value: float) -> float:
    """The mean of `value` over all workers."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


class Stopped(Exception):  # noqa: N818 - no error
    """Ctrl+C, and the run is saved."""


def train(args: argparse.Namespace, rank: int, num_workers: int) -> None:
    """Train, then report; every worker runs this, worker 0 prints."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_workers))
    corpus = read_corpus(args.data, args.context)
    torch.manual_seed(args.seed)  # the same start on every worker
    gpt = GPT(len(corpus.alphabet), args.context, args.width, args.layers, args.heads)
    data = torch.Generator().manual_seed(args.seed * 1000 + rank)  # other batches on every worker

    optim_fn = functools.partial(optim_fn_adamw, lr=args.lr, beta2=0.99)
    num_warmup = min(100, args.steps // 10)
    lr_scheduler_fn = functools.partial(lr_scheduler_fn_cosine_with_warmup, t_max=args.steps, t_warmup=num_warmup)
    model: Any
    optimizer = scheduler = None
    if args.baseline == "ddp":
        model = DDPBaseline(gpt)
        optimizer = optim_fn(list(gpt.named_parameters()))
        scheduler = lr_scheduler_fn(optimizer)
    else:
        model = DecentralizedDataParallel(gpt, optim_fn, lr_scheduler_fn, topology=args.topology)

    method = "torch DDP" if args.baseline else f"topology {args.topology}"
    num_parameters = sum(parameter.numel() for parameter in gpt.parameters())
    screen = Screen(args.steps, enabled=rank == 0)
    screen.say(f"{num_workers} worker(s), {method}, {num_parameters:,} parameters a replica")
    screen.say(f"{len(corpus.train):,} characters to train on, {len(corpus.alphabet)} distinct")
    screen.say(f"{len(corpus.validation):,} characters held out: {corpus.held_out}")
    evaluate = functools.partial(validation_loss, model, corpus, args.context)
    curves = Curves(title=f"{num_workers} workers, {method}")
    losses: list[Tensor] = []
    num_before = 0  # steps of the run that is resumed
    if args.resume:
        exact = args.resume == "exact"
        loaded = load(model, args.save, start=args.resume, extra={"data": data} if exact else None)
        num_before = screen.num_before = loaded.step
        losses = loaded.extra["losses"]
        curves.load_state_dict(loaded.extra["curves"])
        if not exact:
            data.manual_seed(args.seed * 1000 + rank + loaded.step)
        screen.say(f"goes on after step {num_before} of {loaded.path}")
    else:
        curves.add_validation(0, mean_over_workers(evaluate(NUM_VALIDATION_WINDOWS)))
    first = curves.validation[0][1]

    num_characters_per_step = num_workers * args.batch * args.context
    started = time.perf_counter()
    stop = None if args.baseline else StopSignal(model)
    with screen, stop or contextlib.nullcontext():
        for step in range(num_before + 1, args.steps + 1):
            loss = model(*corpus.batch(args.batch, args.context, data))
            model.zero_grad()
            loss.backward()  # a DecentralizedDataParallel mixes and updates its parameters here
            if optimizer is not None and scheduler is not None:  # torch DDP only
                optimizer.step()
                scheduler.step()
            losses.append(loss.detach())

            if step % args.report_every == 0 or step == args.steps:
                recent = mean_over_workers(torch.stack(losses).mean().item())
                losses.clear()
                distance = model.consensus_distance()
                elapsed_s = time.perf_counter() - started
                lr = scheduler.get_last_lr()[0] if scheduler is not None else model.get_lr()
                curves.add(step, recent, distance)
                speed = (step - num_before) * num_characters_per_step / elapsed_s
                screen.update(step, recent, speed, lr, distance)
            if step % max(1, args.steps // 10) == 0 and step < args.steps:
                curves.add_validation(step, mean_over_workers(evaluate(NUM_VALIDATION_WINDOWS // 4)))
            is_stopped = stop is not None and stop.requested()
            if is_stopped or (args.save_every and step % args.save_every == 0):
                saved = save(model, args.save, extra={"data": data, "curves": curves, "losses": losses}, keep=2)
                if is_stopped:
                    raise Stopped(f"stopped after step {step}, saved in {saved}: go on with --resume")
    elapsed_s = time.perf_counter() - started

    own: list[float] = [0.0] * num_workers
    dist.all_gather_object(own, evaluate(NUM_VALIDATION_WINDOWS))
    with model.consensus():  # every replica is the average of all in here
        together = evaluate(NUM_VALIDATION_WINDOWS)
        if rank == 0:
            text = gpt.sample(corpus.prompt(), args.sample, torch.Generator().manual_seed(args.seed))
    if rank == 0:
        curves.add_validation(args.steps, sum(own) / num_workers)
        curves.consensus = together
        image = args.output / "curves.png"
        draw(curves, image)
        screen.say(f"\na sample of the consensus model:\n\n{corpus.text(text).strip()}\n")
        screen.say("validation loss, nats per character")
        screen.say(f"  before training    {first:.4f}")
        for worker, value in enumerate(own):
            screen.say(f"  replica {worker}          {value:.4f}")
        screen.say(f"  consensus model    {together:.4f}")
        screen.say(f"training took {elapsed_s:.0f} s; curves: {image}")


# ------------------------------------------------------------------------------------- the command line


def positive(text: str) -> int:
    """An integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def parse() -> argparse.Namespace:
    """Read the options; each has a default with which the whole run takes about two minutes on two cores."""
    usage = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(
        description=f"{usage[0]}\n\n{usage[1]}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workers", type=positive, help="start this many workers with torchrun (default: one, without it)")
    add("--topology", default="exp", help="exp, ring, complete or alternating-exp-ring (default: exp)")
    add("--baseline", choices=["ddp"], help="train under torch DDP instead")
    add("--data", type=Path, metavar="FILE", help="a UTF-8 text to train on; its last tenth is held out")
    add("--output", type=Path, default=Path("runs/shakespeare"), metavar="DIR", help="where curves.png goes")
    add("--steps", type=positive, default=1200, help="updates of every worker (default: %(default)s)")
    add("--batch", type=positive, default=4, help="windows a worker and step (default: %(default)s)")
    add("--context", type=positive, default=64, help="characters in a window (default: %(default)s)")
    add("--width", type=positive, default=128, help="width of the model (default: %(default)s)")
    add("--layers", type=positive, default=3, help="blocks of the model (default: %(default)s)")
    add("--heads", type=positive, default=4, help="attention heads a block (default: %(default)s)")
    add("--lr", type=float, default=4e-3, help="peak learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the start, the batches and the sample (default: %(default)s)")
    add("--sample", type=positive, default=400, help="characters to write at the end (default: %(default)s)")
    add("--save", type=Path, metavar="DIR", help="where the run is saved (default: checkpoints in --output)")
    add("--save-every", type=positive, metavar="N", help="save every N steps too, not only on Ctrl+C")
    add("--resume", nargs="?", const="exact", choices=["exact", "consensus"],
        help="go on with the run saved in --save; with 'consensus' on another number of workers or topology, from "
             "the average of its replicas")  # fmt: skip
    add("--report-every", type=positive, default=10, help="steps between reports (default: %(default)s)")
    args = parser.parse_args()
    args.save = args.save or args.output / "checkpoints"
    return args


def check(args: argparse.Namespace, num_workers: int) -> None:
    """Refuse what cannot work before any worker starts on it."""
    missing = [name for name in ("matplotlib", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"{' and '.join(missing)} not installed: run `pip install {' '.join(missing)}`")
    if not 0 < args.lr < 1:
        raise InputError(f"--lr {args.lr} is not between 0 and 1: give a learning rate such as 4e-3")
    if args.context > 4096 or args.width > 8192:
        raise InputError(f"--context {args.context} --width {args.width}: at most 4096 and 8192 fit this example")
    if args.width % args.heads:
        raise InputError(f"--width {args.width} is not a multiple of --heads {args.heads}: change one of them")
    try:
        build(args.topology, Layout(num_workers, int(os.environ.get("LOCAL_WORLD_SIZE", num_workers))))
    except TopologyError as error:
        raise InputError(str(error)) from error
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {args.output} cannot be made ({error.strerror})") from error
    if args.baseline and (args.resume or args.save_every):
        raise InputError("--baseline ddp is neither saved nor resumed: leave out --resume and --save-every")
    if args.resume and not checkpoints(args.save):
        raise InputError(f"--resume: {args.save} holds no checkpoint: give the directory of a run with --save")
    read_corpus(args.data, args.context)


def launch(num_workers: int) -> int:
    """Run this command again on `num_workers` workers; returns the exit status."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in ("", ".agent.server.api", ".multiprocessing.api"):  # workers speak for themselves
        logging.getLogger(f"torch.distributed.elastic{name}").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = ["--standalone", "--nproc-per-node", str(num_workers), "--signals-to-handle", "SIGTERM,SIGINT"]
    try:
        run.main([*options, *sys.argv])
    except ChildFailedError as failed:
        return max(1, failed.get_first_failure()[1].exitcode)
    except SignalException:  # it was handed on to the workers, and they have ended
        return 130
    return 0


def main() -> int:
    """Start the workers, or be one of them."""
    args = parse()
    under_torchrun = "RANK" in os.environ
    speaks = os.environ.get("RANK", "0") == "0"
    num_workers = int(os.environ["WORLD_SIZE"]) if under_torchrun else args.workers or 1
    try:
        check(args, num_workers)
        if args.workers and not under_torchrun:
            return launch(args.workers)
        rank, num_workers = initialize_dist()
        train(args, rank, num_workers)
        dist.destroy_process_group()
    except Stopped as stopped:
        if speaks:
            print(stopped)
        dist.destroy_process_group()
        return 130
    except InputError as error:
        if speaks:
            print(f"shakespeare.py: {error}", file=sys.stderr)
        return 2
    except DecentDPError as error:  # the message names the rank
        print(f"shakespeare.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if speaks:
            print("\x1b[?25h\nstopped" if sys.stdout.isatty() else "stopped")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
